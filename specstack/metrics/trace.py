"""Traces of rounds: JSON Lines, one round a line, numbers only, in files that replace each other.

The first line of a file is the header (`specstack_trace`: the format's version, `run`, and what the
writer was given). Times are whole microseconds, survivals thousandths without the zeros that end a
row, requests small integers in order of appearance: no text, no tokens, no name from outside.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from specstack.metrics.record import RoundRecord

logger = logging.getLogger(__name__)

TRACE_VERSION = 1
VERSION_KEY = "specstack_trace"
FILE_PATTERN = "rounds-*.jsonl"
REMEMBERED_REQUESTS = 8192
"""Requests whose number is kept: one that is back after so many others is a new one."""

_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_PLAIN = {
    "num_requests": "b", "num_opted_out": "o", "num_gated": "g", "num_drafting": "d",
    "draft_budget": "w", "reason": "r", "num_draft_tokens": "n", "nodes_per_depth": "nd",
    "num_correct": "c", "drafts_per_drafter": "dd", "correct_per_drafter": "cd",
    "min_survival": "p", "num_drafts": "m", "ended": "e", "context_lens": "x",
    "num_queued": "q", "kv_usage": "u",
}  # fmt: skip
_SECONDS = {
    "draft_seconds": "td", "build_seconds": "tb", "verify_seconds": "tv", "accept_seconds": "ta",
    "started_at": "at", "step_seconds": "ts",
}  # fmt: skip
_IDS = "i"
_TUPLES = frozenset(
    ("nodes_per_depth", "num_correct", "drafts_per_drafter", "correct_per_drafter", "num_drafts",
     "context_lens", "ended")
)  # fmt: skip


class TraceError(ValueError):
    """A trace that cannot be read: says which file, which line and why."""


class TraceWriter:
    """Writes the rounds of one server into a folder; one writer per folder at a time.

    A round is in the operating system's hands when `write` returns, so a crash loses at most a
    part of the last line. A folder that fails (full, gone) is reported once and written to no more:
    serving goes on.
    """

    def __init__(
        self,
        folder: str | Path,
        header: Mapping[str, Any],
        max_bytes: int = 64 * 1024 * 1024,
        num_files: int = 4,
    ) -> None:
        """Open the next file of `folder`, which is made where it is missing.

        Args:
            folder: holds `rounds-000001.jsonl` ...; files of earlier runs count and are replaced.
            header: JSON values to tell runs apart: plan hash, model, policy, device, cost key ...
            max_bytes: of all files together.
            num_files: at most, each of `max_bytes / num_files`.

        Raises:
            ValueError: the limits leave no room for a header and rounds.
            OSError: the folder cannot be made or written.
        """
        if num_files < 2:
            raise ValueError(f"num_files must be at least 2 to replace one at a time: {num_files}")
        run = int(time.time() * 1e6)
        marks = {VERSION_KEY: TRACE_VERSION, "run": run}
        self._header = orjson.dumps({**header, **marks}, option=_LINE)
        self._max_file_bytes = max_bytes // num_files
        if self._max_file_bytes < 2 * len(self._header):
            raise ValueError(
                f"max_bytes {max_bytes} in {num_files} files is too small for headers of"
                f" {len(self._header)} bytes and rounds after them"
            )
        self._num_files = num_files
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._next_number = 0
        self._open_next()

    @property
    def recording(self) -> bool:
        """False once the folder has failed, or after `close`."""
        return not self._file.closed

    def write(self, record: RoundRecord) -> None:
        """Append a round. Microseconds of host time: no thread, no device."""
        if self._file.closed:
            return
        fields = _encode(record, self._numbers_of(record.request_ids))
        line = orjson.dumps(fields, option=_LINE)
        if len(self._header) + len(line) > self._max_file_bytes:
            logger.warning("%s: a round of %d bytes fits into no file", self._folder, len(line))
            return
        try:
            if self._num_bytes + len(line) > self._max_file_bytes:
                self._file.close()
                self._open_next()
            self._file.write(line)
        except OSError as error:
            logger.error("%s: rounds are recorded no more: %s", self._folder, error)
            self._file.close()
            return
        self._num_bytes += len(line)

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_next(self) -> None:
        present = _files_of(self._folder)
        for path in present[: max(0, len(present) - self._num_files + 1)]:
            path.unlink()
        place = int(present[-1].stem.removeprefix("rounds-")) + 1 if present else 1
        path = self._folder / f"rounds-{place:06d}.jsonl"
        self._file = path.open("xb", buffering=0)
        self._file.write(self._header)
        self._num_bytes = len(self._header)

    def _numbers_of(self, request_ids: tuple[str, ...]) -> list[int]:
        numbers = []
        for name in request_ids:
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = self._next_number
                self._next_number += 1
            else:
                self._numbers.move_to_end(name)
            numbers.append(number)
        while len(self._numbers) > REMEMBERED_REQUESTS:
            self._numbers.popitem(last=False)
        return numbers


def read_trace(path: str | Path) -> tuple[Mapping[str, Any], Iterator[RoundRecord]]:
    """Return the header of a trace and its rounds, read as they are asked for.

    Args:
        path: a file, or a folder: then all files of its newest run, in order.

    Raises:
        TraceError: there is no trace, or a line is not what it should be (raised when it is
            reached). A last line that a crash cut short is left out, with a warning.
    """
    path = Path(path)
    files = _files_of(path) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no file {FILE_PATTERN} in this folder")
    headers = [_read_header(file) for file in files]
    run = headers[-1]["run"]
    of_run = [file for file, header in zip(files, headers, strict=True) if header["run"] == run]
    if len(of_run) < len(files):
        logger.warning("%s: files before %s are of earlier runs", path, of_run[0].name)
    return headers[-1], _read_rounds(of_run)


def _files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob(FILE_PATTERN))


def _read_header(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    try:
        header = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}:1: not a trace of rounds: {error}") from error
    if not isinstance(header, dict) or VERSION_KEY not in header:
        raise TraceError(f"{path}:1: not a trace of rounds: the header lacks {VERSION_KEY!r}")
    if header[VERSION_KEY] != TRACE_VERSION:
        raise TraceError(
            f"{path}:1: a trace of version {header[VERSION_KEY]}; this specstack reads"
            f" {TRACE_VERSION}"
        )
    return header


def _read_rounds(files: Iterable[Path]) -> Iterator[RoundRecord]:
    for path in files:
        with path.open("rb") as file:
            next(file)
            for number, line in enumerate(file, start=2):
                if not line.endswith(b"\n"):
                    logger.warning("%s:%d: cut short, left out", path, number)
                    continue
                try:
                    yield _decode(orjson.loads(line))
                except (KeyError, TypeError, ValueError) as error:
                    raise TraceError(f"{path}:{number}: not a round: {error!r}") from error


def _encode(record: RoundRecord, numbers: list[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {key: getattr(record, name) for name, key in _PLAIN.items()}
    fields["u"] = round(record.kv_usage, 4)
    for name, key in _SECONDS.items():
        seconds = getattr(record, name)
        fields[key] = None if seconds is None else round(seconds * 1e6)
    thousandths = (record.survivals * 1000 + 0.5).astype(np.int64)
    fields["s"], fields["sw"] = _without_last_zeros(thousandths), thousandths.shape[1]
    ranks = record.accept_ranks
    fields["a"], fields["aw"] = _without_last_zeros(ranks), ranks.shape[1]
    fields[_IDS] = numbers
    return fields


def _decode(fields: Mapping[str, Any]) -> RoundRecord:
    values: dict[str, Any] = {name: fields[key] for name, key in _PLAIN.items()}
    for name in _TUPLES:
        values[name] = tuple(values[name])
    for name, key in _SECONDS.items():
        values[name] = None if fields[key] is None else fields[key] / 1e6
    ranks = _with_last_zeros(fields["a"], fields["aw"])
    survivals = _with_last_zeros(fields["s"], fields["sw"]).astype(np.float32) / np.float32(1000)
    ids = tuple(str(number) for number in fields[_IDS])
    return RoundRecord(**values, survivals=survivals, accept_ranks=ranks, request_ids=ids)


def _without_last_zeros(rows: NDArray[np.int64]) -> list[list[int]]:
    """Rows without the zeros at their ends."""
    places = np.arange(1, rows.shape[1] + 1)
    lengths = np.where(rows != 0, places, 0).max(axis=1, initial=0).tolist()
    return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)]


def _with_last_zeros(rows: list[list[int]], width: int) -> NDArray[np.int64]:
    full = np.zeros((len(rows), width), dtype=np.int64)
    for row, values in zip(full, rows, strict=True):
        row[: len(values)] = values
    return full
