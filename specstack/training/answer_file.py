"""A file of answers that grows and survives its writer: one writer at a time, whole lines only.

A line is handed to the system in one piece as soon as its answer is there, so a killed process
loses nothing but what it was waiting for; at most the last line is torn, and is dropped when the
file is opened again. Nothing is forced to the disk before the file is closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specstack.models.store import locked
from specstack.training.answers import read_answers


class InUse(RuntimeError):
    """Another process writes to the file; the text names it."""


class LineFile:
    """Appends whole lines to a file, unbuffered."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """Open `path`, made if missing, emptied unless `keep`; a torn last line is dropped."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (0 if keep else os.O_TRUNC)
        self.path = path
        self._descriptor = os.open(path, flags, 0o644)
        self._size = _end_of_last_line(self._descriptor)
        os.ftruncate(self._descriptor, self._size)

    def append(self, line: bytes) -> None:
        """Write one line, its end included.

        Raises:
            OSError: it could not be written whole (a full disk); the file is as it was.
        """
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            error.filename = str(self.path)
            raise
        self._size += len(line)

    def close(self) -> None:
        """Bring everything to the disk."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class AnswerFile(LineFile):
    """A file of answers, and what it held when it was opened."""

    def __init__(self, path: Path) -> None:
        """Open `path` and keep its answers.

        Raises:
            BadAnswers: it holds something else, and is left as it is.
        """
        found = read_answers(path) if path.exists() else ()
        self.answered = frozenset(answer.line for answer in found)
        super().__init__(path, keep=True)


@contextmanager
def writing(path: Path) -> Iterator[AnswerFile]:
    """Open a file of answers for the only writer; it ends with the process at the latest.

    Raises:
        InUse: another process is that writer.
        BadAnswers: the file holds something else than answers.
    """

    def refuse(pid: str) -> None:
        raise InUse(f"{path} is being written to by process {pid}")

    with locked(path.with_name(f".{path.name}.lock"), on_wait=refuse):
        file = AnswerFile(path)
        try:
            yield file
        finally:
            file.close()


def _end_of_last_line(descriptor: int) -> int:
    """Return the size of the file without what follows the last line end."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 65536)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
