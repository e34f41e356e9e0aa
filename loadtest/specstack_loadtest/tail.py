"""Reads what workers append to their files: as they append it, and all of it afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specstack_loadtest.records import RequestRecord, read_records

REQUESTS, CLIENT = "requests", "client"
"""Kinds of files: workers write KIND-n.jsonl, which are joined to KIND.jsonl."""
LOAD_FILE = "load.json"
"""Of the leading process: the epoch, the numbers of the workers, those that are done, and bugs."""


class FolderTail:
    """The new lines of the files of one kind, from all workers."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._read: dict[Path, int] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The objects of the lines that were completed since the last call."""
        for path in worker_files(self._folder, self._kind):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            yield from (json.loads(line) for line in whole.splitlines())


def worker_files(folder: Path, kind: str) -> list[Path]:
    """Those that are there."""
    return sorted(folder.glob(f"{kind}-*.jsonl"))


def join_files(folder: Path) -> list[RequestRecord]:
    """Make one file of the workers' of each kind, and remove these; returns the records.

    Raises:
        ValueError: a worker wrote something else; its files stay.
    """
    records = [r for path in worker_files(folder, REQUESTS) for r in read_records(path)]
    records.sort(key=lambda record: record.identity)
    samples = sorted(FolderTail(folder, CLIENT), key=lambda one: (one["t_s"], one["worker"]))
    _write(folder / f"{REQUESTS}.jsonl", (record.as_line() for record in records))
    _write(folder / f"{CLIENT}.jsonl", map(json.dumps, samples))
    for kind in (REQUESTS, CLIENT):
        for path in worker_files(folder, kind):
            path.unlink()
    return records


def _write(path: Path, lines: Iterator[str]) -> None:
    """Whole or not at all: the workers' files count where there is none."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    part.replace(path)
