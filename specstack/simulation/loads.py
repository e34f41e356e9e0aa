"""`--load`: from a few words, or a file of arrivals, to a workload.

Files are those of the Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens;
github.com/Azure/AzurePublicDataset) and of Mooncake (JSON Lines: timestamp in milliseconds,
input_length, output_length; github.com/kvcache-ai/Mooncake).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specstack.simulation.errors import SimulationError
from specstack.simulation.workload import Floats, Ints, Workload
from specstack_dsl.errors import did_you_mean

BURSTINESS = 0.25
"""Shape of the Gamma law of gaps of `burst`: their coefficient of variation is 2."""
SPREAD = 0.5
"""Standard deviation of the logarithm of made up lengths."""

Arrival = tuple[float, int, int]
"""Seconds, tokens of the prompt, tokens of the answer."""


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
    read = {".csv": _azure, ".jsonl": _mooncake}.get(path.suffix)
    if read is None:
        raise SimulationError(
            f"--load {text}: expected trace:FILE.csv (TIMESTAMP,ContextTokens,GeneratedTokens) or"
            " trace:FILE.jsonl (timestamp, input_length, output_length)"
        )
    try:
        rows = list(islice(read(path), options.max_requests))
    except OSError as error:
        raise SimulationError(f"{path}: {error.strerror}") from error
    if not rows:
        raise SimulationError(f"{path}: no request in this file")
    times, prompts, outputs = (
        np.asarray(column, dtype=np.float64) for column in zip(*rows, strict=True)
    )
    order = np.argsort(times, kind="stable")
    factor = float(options.scale_lengths)
    return Workload(
        text,
        _at_least_one(prompts[order] * factor),
        _at_least_one(outputs[order] * factor),
        arrivals=(times[order] - times[order[0]]) * options.scale_time,
    )


def _azure(path: Path) -> Iterator[Arrival]:
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                when = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                yield when, int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise _bad_line(path, number, error) from error


def _mooncake(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                yield row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"])
            except (KeyError, TypeError, ValueError) as error:
                raise _bad_line(path, number, error) from error


def _bad_line(path: Path, number: int, error: Exception) -> SimulationError:
    return SimulationError(f"{path}:{number}: not an arrival: {error!r}")


KINDS: dict[str, Callable[[str, str, LoadOptions], Workload]] = {
    "closed": _closed,
    "steps": _steps,
    "poisson": _poisson,
    "burst": _burst,
    "trace": _trace,
}
