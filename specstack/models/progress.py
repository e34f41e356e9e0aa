"""Progress of a preparation on the terminal: bars on stderr, only messages where there is none."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Report(Protocol):
    """Receives the progress of a preparation."""

    def step(self, name: str, done: int, total: int, unit: str) -> None:
        """`done` of `total` units of a step have been done; the unit is "MB" or a plural noun."""

    def message(self, text: str) -> None:
        """Something that the user should know about: a wait, a repair."""


class TerminalReport:
    """Bars while in use as a context manager; on anything but a terminal only the messages."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} {task.fields[unit]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TerminalReport:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def step(self, name: str, done: int, total: int, unit: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, unit=unit)
        self._progress.update(self._tasks[name], completed=done)

    def message(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
