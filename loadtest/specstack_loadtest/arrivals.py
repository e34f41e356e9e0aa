"""When conversations begin: the phases of a scenario, and the due times within them.

All of it follows from the scenario and its seed. Times are seconds since the run's epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specstack.request_traces import TracedRequest, read_request_trace
from specstack_loadtest.scenario import Closed, Gamma, Poisson, Scenario, Trace
from specstack_loadtest.seeds import Purpose, random_of

BLOCK = 4096
"""Gaps that are drawn at once."""


@dataclass(frozen=True)
class Phase:
    """A stretch of a scenario at one load, with a warm-up of its own."""

    number: int
    name: str
    users: int | None
    """Of a closed loop."""
    rate: float | None
    """Conversations per second of a drawn open loop; a trace has its own."""
    starts_s: float
    warmup_s: float
    """Requests due before this has passed are warm-up."""
    seconds: float | None
    """How long requests come, warm-up included; None: until there were `requests`."""
    requests: int | None
    """How many conversations come, warm-up included; None: as many as come in `seconds`."""
    warmup_requests: int = 0
    """Conversations of a lower index are warm-up."""

    @property
    def ends_s(self) -> float | None:
        """From when on no request comes; None: when there were `requests`."""
        return None if self.seconds is None else self.starts_s + self.seconds

    def is_warmup(self, index: int, due_s: float) -> bool:
        """Whether a request comes before the measured part."""
        return index < self.warmup_requests or due_s < self.starts_s + self.warmup_s


def phases_of(scenario: Scenario) -> tuple[Phase, ...]:
    """The phases, one after the other. Reads no file."""
    stop, warmup = scenario.stop, scenario.warmup
    return tuple(
        Phase(
            number=number,
            name=name,
            users=users,
            rate=rate,
            starts_s=number * (stop.seconds or 0.0),
            warmup_s=warmup.seconds or 0.0,
            seconds=stop.seconds,
            requests=stop.requests,
            warmup_requests=warmup.requests or 0,
        )
        for number, (name, users, rate) in enumerate(_levels(scenario))
    )


def _levels(scenario: Scenario) -> list[tuple[str, int | None, float | None]]:
    """Name, users and rate of each phase."""
    load = scenario.arrivals
    if isinstance(load, Closed):
        return [(f"{n} user{'s' if n > 1 else ''}", n, None) for n in load.users]
    if isinstance(load, Trace):
        return [("trace", None, None)]
    what = "requests" if scenario.workload.turns == 1 else "conversations"
    return [(f"{rate:g} {what}/s", None, rate) for rate in load.rate]


def arrivals_of(scenario: Scenario, phase: Phase) -> NDArray[np.float64] | None:
    """When each conversation of a phase is due, by its index, in order; None for a closed loop.

    Raises:
        TraceFileError, OSError: the trace cannot be read.
    """
    load = scenario.arrivals
    if isinstance(load, Closed):
        return None
    if isinstance(load, Trace):
        times = np.array([request.seconds for request in traced_requests(scenario, load)])
        return phase.starts_s + _within(phase, times)
    assert phase.rate is not None
    random = random_of(scenario.seed, Purpose.ARRIVALS, phase.number)
    return phase.starts_s + _renewal(phase, phase.rate, _cv(load), random)


def traced_requests(scenario: Scenario, load: Trace) -> Sequence[TracedRequest]:
    """The requests of the trace after `skip`, scaled, by time; the first comes at 0.

    Raises:
        TraceFileError, OSError: the trace cannot be read.
    """
    rows = list(read_request_trace(scenario.resolve(load.file)))[load.skip :]
    rows.sort(key=lambda row: row.seconds)
    scale_outputs = load.scale_lengths if load.scale_outputs is None else load.scale_outputs
    return [
        replace(
            row,
            seconds=(row.seconds - rows[0].seconds) * load.scale_time,
            prompt_tokens=max(1, round(row.prompt_tokens * load.scale_lengths)),
            output_tokens=max(1, round(row.output_tokens * scale_outputs)),
        )
        for row in rows
    ]


def _cv(load: Poisson | Gamma) -> float:
    return load.cv if isinstance(load, Gamma) else 1.0


def _renewal(
    phase: Phase, rate: float, cv: float, random: np.random.Generator
) -> NDArray[np.float64]:
    """A stationary renewal process with Gamma gaps, from 0.

    The phase begins at a random moment of the process, most likely within a long gap, so the first
    request comes after a random part of a gap that is drawn in proportion to its length (again a
    Gamma law, of shape + 1). Beginning with a whole gap would bring (cv^2 - 1) / 2 requests too
    many: four at cv 3.
    """
    shape = cv**-2
    scale = 1 / (shape * rate)
    times = np.array([random.random() * random.gamma(shape + 1, scale)])
    while not _complete(phase, times):
        gaps = random.gamma(shape, scale, BLOCK)
        times = np.concatenate([times, times[-1] + np.cumsum(gaps)])
    return _within(phase, times)


def _complete(phase: Phase, times: NDArray[np.float64]) -> bool:
    if phase.seconds is not None:
        return bool(times[-1] >= phase.seconds)
    assert phase.requests is not None
    return len(times) >= phase.requests


def _within(phase: Phase, times: NDArray[np.float64]) -> NDArray[np.float64]:
    return times[: phase.requests] if phase.seconds is None else times[times < phase.seconds]
