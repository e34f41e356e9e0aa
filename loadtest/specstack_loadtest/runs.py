"""One run's raw files, read, and the part of it that counts for a phase.

What counts: requests that were due after the warm-up of their phase and before its end, and tokens
that arrived in between, whichever request they belong to. What arrives at the very end counts: an
answer may be what ends it. What arrives at the very beginning does not. Requests that the client
itself broke off, because its run was stopped, count neither as answered nor as failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specstack_loadtest.answers import token_arrivals
from specstack_loadtest.arrivals import Phase
from specstack_loadtest.estimates import Floats, Stretches
from specstack_loadtest.folder import KILLED, raw_folder
from specstack_loadtest.records import CANCELLED, RequestRecord, read_records
from specstack_loadtest.tail import CLIENT, REQUESTS, worker_files

STRETCH_S = 5.0
"""About the length of the stretches that throughput is resampled by."""


@dataclass(frozen=True)
class Scrape:
    """The server's metrics at a moment."""

    t_s: float
    values: dict[str, float]

    def after(self, t_s: float, changed: Mapping[str, float | None]) -> Scrape:
        """The next one, from what changed since; None: it is there no more."""
        values = {**self.values, **changed}
        return Scrape(t_s, {key: value for key, value in values.items() if value is not None})


@dataclass(frozen=True)
class Run:
    """The raw data of one repeat of one side."""

    side: str
    repeat: int
    records: tuple[RequestRecord, ...]
    scrapes: tuple[Scrape, ...]
    samples: tuple[dict[str, Any], ...]
    """Of the client's own load."""
    server: dict[str, Any]
    outcome: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, side: str, repeat: int) -> Run | None:
        """Read a run's files, those of its workers where it was killed before they were joined.

        Returns:
            None: it left no requests.

        Raises:
            ValueError: a file is not what it should be; names it.
        """
        raw = raw_folder(folder, side, repeat)
        paths = _joined_or_not(raw, REQUESTS)
        if not paths:
            return None
        records = [record for path in paths for record in read_records(path)]
        keys = ("t_s", "lag_s", "cpu")
        return cls(
            side,
            repeat,
            tuple(sorted(records, key=lambda record: record.identity)),
            tuple(_scrapes(raw / "metrics.jsonl")),
            tuple(line for path in _joined_or_not(raw, CLIENT) for line in _lines(path, keys)),
            _object(raw / "server.json"),
            _object(raw / "run.json") or {"complete": False, "reason": KILLED},
        )

    @property
    def is_whole(self) -> bool:
        """Whether it ended as it should."""
        return self.outcome.get("complete") is True

    @cached_property
    def ended_s(self) -> float:
        """When the last of its requests ended."""
        return max((record.end_s for record in self.records), default=0.0)

    @cached_property
    def token_arrivals(self) -> tuple[Floats, Floats]:
        """When tokens of any request arrived, and how many each time."""
        found = [token_arrivals(record) for record in self.records]
        if not found:
            return np.zeros(0), np.zeros(0)
        times, amounts = (np.concatenate(column) for column in zip(*found, strict=True))
        return times, amounts


def _joined_or_not(raw: Path, kind: str) -> list[Path]:
    """The file that all workers' were made one of, else theirs."""
    joined = raw / f"{kind}.jsonl"
    return [joined] if joined.exists() else worker_files(raw, kind)


def _scrapes(path: Path) -> Iterator[Scrape]:
    scrape = Scrape(0.0, {})
    for line in _lines(path, ("t_s", "values")):
        scrape = scrape.after(line["t_s"], line["values"])
        yield scrape


@dataclass(frozen=True)
class Part:
    """What of a run counts for a phase."""

    run: Run
    start_s: float
    end_s: float
    is_cut: bool
    """The run ended before the phase did."""
    records: tuple[RequestRecord, ...]
    """That were due in it, without those that the client itself broke off."""

    @classmethod
    def of(cls, run: Run, phase: Phase) -> Part | None:
        """None: the run has nothing of it."""
        own = [r for r in run.records if r.phase == phase.number and not r.warmup]
        if phase.seconds is None:
            if not own:
                return None
            start_s, end_s = min(r.due_s for r in own), max(r.end_s for r in own)
        else:
            start_s, end_s = phase.starts_s + phase.warmup_s, phase.starts_s + phase.seconds
            start_s = max(start_s, _first_counted_s(run, phase))
        is_cut = not run.is_whole and (phase.seconds is None or run.ended_s < end_s)
        end_s = min(end_s, run.ended_s) if is_cut else end_s
        if end_s <= start_s:
            return None
        kept = own if phase.seconds is None else [r for r in own if start_s <= r.due_s < end_s]
        return cls(run, start_s, end_s, is_cut, tuple(r for r in kept if r.error != CANCELLED))

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s

    def stretches(self, times: Floats, amounts: Floats) -> Stretches:
        """Amounts that came after its start and until its end, by stretches of about
        `STRETCH_S`.
        """
        num = max(1, round(self.seconds / STRETCH_S))
        edges = np.linspace(self.start_s, self.end_s, num + 1)
        inside = (times > self.start_s) & (times <= self.end_s)
        sums, _ = np.histogram(times[inside], edges, weights=amounts[inside])
        return Stretches(sums.astype(np.float64), np.diff(edges))

    def tokens(self) -> Stretches:
        """Output tokens that arrived."""
        return self.stretches(*self.run.token_arrivals)

    def answers(self) -> Stretches:
        """Answers that were complete."""
        ends = np.array([r.end_s for r in self.run.records if r.error is None], np.float64)
        return self.stretches(ends, np.ones(len(ends)))

    def in_flight(self) -> tuple[float, int]:
        """Requests that were sent and not answered: mean over time, and most."""
        seconds, num = self._in_flight_stretches()
        return float(seconds @ num / self.seconds), int(num.max(initial=0))

    def seconds_over(self, num_in_flight: int) -> float:
        """How long more requests than that were in flight."""
        seconds, num = self._in_flight_stretches()
        return float(seconds[num > num_in_flight].sum())

    def _in_flight_stretches(self) -> tuple[Floats, NDArray[np.int64]]:
        """Seconds in which nobody came or went, and how many requests were in flight in them."""
        sent = np.sort([record.sent_s for record in self.run.records])
        ends = np.sort([record.end_s for record in self.run.records])
        times = [self.start_s, self.end_s, *sent, *ends]
        edges = np.unique(np.clip(times, self.start_s, self.end_s))
        began, ended = (np.searchsorted(at, edges[:-1], "right") for at in (sent, ends))
        return np.diff(edges), began - ended

    def scrapes(self) -> list[Scrape]:
        """Those within it."""
        return [s for s in self.run.scrapes if self.start_s <= s.t_s <= self.end_s]

    def samples(self) -> list[dict[str, Any]]:
        """The client's within it."""
        return [s for s in self.run.samples if self.start_s <= s["t_s"] <= self.end_s]


def pooled(found: Iterable[Stretches]) -> Stretches:
    """The stretches of several parts together."""
    listed = list(found)
    if not listed:
        return Stretches(np.zeros(0), np.zeros(0))
    return Stretches(
        np.concatenate([s.amounts for s in listed]), np.concatenate([s.seconds for s in listed])
    )


def read_runs(folder: Path, sides: Sequence[str], repeats: int) -> Iterator[Run]:
    """Every run that left requests, sides in order."""
    for side in sides:
        for repeat in range(repeats):
            run = Run.read(folder, side, repeat)
            if run is not None:
                yield run


def _first_counted_s(run: Run, phase: Phase) -> float:
    """Where the warm-up is a number of requests: when the first one after it was due."""
    if not phase.warmup_requests:
        return phase.starts_s
    counted = [r.due_s for r in run.records if r.phase == phase.number and not r.warmup]
    return min(counted, default=phase.starts_s)


def _lines(path: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; none if it is not there. As of records, a line without its
    end is left out.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            if not isinstance(found, dict) or not found.keys() >= set(keys):
                raise ValueError(f"{path}:{number}: not an object with {', '.join(keys)}")
            yield found


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not an object")
    return found
