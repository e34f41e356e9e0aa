"""`--load`: from a few words, or a trace of `specstack.request_traces`, to a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specstack.request_traces import FORMS, TraceFileError, read_request_trace
from specstack.simulation.errors import SimulationError
from specstack.simulation.workload import Floats, Ints, Workload
from specstack_dsl.errors import did_you_mean

BURSTINESS = 0.25
"""Shape of the Gamma law of gaps of `burst`: their coefficient of variation is 2."""
SPREAD = 0.5
"""Standard deviation of the logarithm of made up lengths."""


@dataclass(frozen=True)
class LoadOptions:
    """What a load is made with, beside its own words."""

    max_requests: int = 200
    prompt_tokens: int = 256
    """Mean of made up prompts."""
    output_tokens: int = 128
    """Mean of made up answers."""
    scale_lengths: Fraction = Fraction(1)
    """Factor of the lengths in a file."""
    scale_time: float = 1.0
    """Factor of the times in a file: below 1 they arrive faster."""
    seed: int = 0


def parse_load(text: str, options: LoadOptions) -> Workload:
    """Return the workload of `KIND:VALUE`.

    Raises:
        SimulationError: names what is wrong, in a file with its line.
    """
    kind, _, value = text.partition(":")
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise SimulationError(
            f"--load {text}: no kind {kind!r}{did_you_mean(kind, KINDS)}; known: {known}"
        )
    return KINDS[kind](text, value, options)


def _closed(text: str, value: str, options: LoadOptions) -> Workload:
    (level,) = _numbers(text, value, "closed:16", int, most=1)
    return _steps_of(text, [level], options)


def _steps(text: str, value: str, options: LoadOptions) -> Workload:
    return _steps_of(text, _numbers(text, value, "steps:1,16,1", int), options)


def _steps_of(text: str, levels: list[int], options: LoadOptions) -> Workload:
    """Each step gets requests in proportion to its concurrency, so that all last about as long."""
    shares = np.cumsum(levels) / sum(levels)
    ends = np.ceil(shares * options.max_requests).astype(np.int64)
    places = np.searchsorted(ends, np.arange(options.max_requests), side="right")
    prompts, outputs = _lengths(options)
    return Workload(text, prompts, outputs, concurrency=np.asarray(levels)[places])


def _poisson(text: str, value: str, options: LoadOptions) -> Workload:
    return _gaps(text, value, "poisson:2.5", 1.0, options)


def _burst(text: str, value: str, options: LoadOptions) -> Workload:
    return _gaps(text, value, "burst:2.5 or burst:2.5,0.1", BURSTINESS, options)


def _gaps(text: str, value: str, example: str, shape: float, options: LoadOptions) -> Workload:
    rate, *rest = _numbers(text, value, example, float, most=1 if shape == 1.0 else 2)
    shape = rest[0] if rest else shape
    random = np.random.default_rng([options.seed, 1])
    gaps = random.gamma(shape, 1.0 / (shape * rate), options.max_requests)
    return Workload(text, *_lengths(options), arrivals=np.cumsum(gaps))


def _lengths(options: LoadOptions) -> tuple[Ints, Ints]:
    random = np.random.default_rng([options.seed, 2])
    spread = random.lognormal(-(SPREAD**2) / 2, SPREAD, (2, options.max_requests))
    prompts, outputs = options.prompt_tokens * spread[0], options.output_tokens * spread[1]
    return _at_least_one(prompts), _at_least_one(outputs)


def _at_least_one(lengths: Floats) -> Ints:
    made: Ints = np.maximum(np.rint(lengths), 1).astype(np.int64)
    return made


def _numbers(text: str, value: str, example: str, form: Callable[[str], Any],
             most: int | None = None) -> list[Any]:  # fmt: skip
    try:
        numbers = [form(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0 or (most is not None and len(numbers) > most):
        raise SimulationError(f"--load {text}: expected numbers above 0, for example {example}")
    return numbers


def _trace(text: str, value: str, options: LoadOptions) -> Workload:
    path = Path(value)
    if path.suffix not in FORMS:
        forms = " or ".join(f"trace:{form}" for form in FORMS.values())
        raise SimulationError(f"--load {text}: expected {forms}")
    try:
        rows = list(islice(read_request_trace(path), options.max_requests))
    except TraceFileError as error:
        raise SimulationError(str(error)) from error
    except OSError as error:
        raise SimulationError(f"{path}: {error.strerror}") from error
    if not rows:
        raise SimulationError(f"{path}: no request in this file")
    rows.sort(key=lambda row: row.seconds)
    times = np.asarray([row.seconds for row in rows])
    factor = float(options.scale_lengths)
    return Workload(
        text,
        _at_least_one(factor * np.asarray([row.prompt_tokens for row in rows])),
        _at_least_one(factor * np.asarray([row.output_tokens for row in rows])),
        arrivals=(times - times[0]) * options.scale_time,
    )


KINDS: dict[str, Callable[[str, str, LoadOptions], Workload]] = {
    "closed": _closed,
    "steps": _steps,
    "poisson": _poisson,
    "burst": _burst,
    "trace": _trace,
}
