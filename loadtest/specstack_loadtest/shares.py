"""Which conversations a worker sends, of several that send a scenario together.

With W workers, worker w takes the indices with index % W == w, in every phase; in one of a closed
loop with fewer users than workers, W is the number of users, and the other workers send nothing.
Which requests there are, and when open loops send them, does not depend on the number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specstack_loadtest.arrivals import Phase, arrivals_of, phases_of
from specstack_loadtest.scenario import Scenario


class Clock:
    """Seconds since a run's epoch; below 0 before it.

    The epoch is a time of day, so that processes and machines can share it; it is looked at once,
    so that a clock that is set does not matter.
    """

    def __init__(self, epoch: float) -> None:
        self._epoch = time.monotonic() + epoch - time.time()

    def __call__(self) -> float:
        return time.monotonic() - self._epoch


@dataclass(frozen=True)
class Start:
    """What a worker is told when the load starts."""

    epoch: float
    """Time of day, in seconds since 1970."""
    worker: int
    num_workers: int

    @classmethod
    def of(cls, data: dict[str, Any]) -> Start:
        """Read what was a message."""
        return cls(float(data["epoch"]), int(data["worker"]), int(data["num_workers"]))


@dataclass(frozen=True)
class Arrival:
    """A conversation of an open loop."""

    due_s: float
    phase: Phase
    index: int


def phase_at(phases: Sequence[Phase], now_s: float) -> Phase | None:
    """The phase that is under way; None before the first and after the last."""
    for phase in phases:
        if phase.starts_s <= now_s and (phase.ends_s is None or now_s < phase.ends_s):
            return phase
    return None


def next_change_s(phases: Sequence[Phase], now_s: float) -> float | None:
    """When the next phase starts, or the last one ends; None: that is over, or has no time."""
    times = [phase.starts_s for phase in phases]
    times += [phase.ends_s for phase in phases[-1:] if phase.ends_s is not None]
    return min((time for time in times if time > now_s), default=None)


def num_users(phase: Phase, worker: int, num_workers: int) -> int:
    """A worker's part of a closed loop's users."""
    assert phase.users is not None
    return (phase.users - worker + num_workers - 1) // num_workers


def open_share(scenario: Scenario, start: Start) -> list[Arrival]:
    """A worker's conversations of an open loop, by time.

    Raises:
        TraceFileError, OSError: a trace cannot be read.
    """
    share = []
    for phase in phases_of(scenario):
        due_s = arrivals_of(scenario, phase)
        assert due_s is not None, "a closed loop has no arrivals"
        indices = range(start.worker, len(due_s), start.num_workers)
        share += [Arrival(float(due_s[index]), phase, index) for index in indices]
    return share


class ClosedShare:
    """A worker's conversations of a closed loop: handed out to its users as they come free.

    A user that begins a conversation has a seat until it ends. When a phase has fewer users than
    the one before, those who are too many find no seat.
    """

    def __init__(self, scenario: Scenario, start: Start) -> None:
        self.phases = phases_of(scenario)
        self._start = start
        self._num_taken = [0] * len(self.phases)
        self.num_seated = 0

    def take(self, now_s: float) -> tuple[Phase, int] | None:
        """Phase and index of the next conversation, and a seat; None: not now."""
        start, phase = self._start, phase_at(self.phases, now_s)
        if phase is None or self.num_seated >= num_users(phase, start.worker, start.num_workers):
            return None
        if (index := self._next_index(phase)) is None:
            return None
        self._num_taken[phase.number] += 1
        self.num_seated += 1
        return phase, index

    def leave(self) -> None:
        """Give a seat back."""
        self.num_seated -= 1

    def is_done(self, now_s: float) -> bool:
        """Whether every conversation was begun and has ended."""
        last = self.phases[-1]
        if self.num_seated or now_s < last.starts_s:
            return False
        if last.requests is not None:
            return self._next_index(last) is None
        return phase_at(self.phases, now_s) is None

    def _next_index(self, phase: Phase) -> int | None:
        """Of the first conversation of its share that was not begun; None: there is none."""
        assert phase.users is not None
        worker, num_sending = self._start.worker, min(self._start.num_workers, phase.users)
        index = worker + num_sending * self._num_taken[phase.number]
        if worker >= num_sending or (phase.requests is not None and index >= phase.requests):
            return None
        return index
