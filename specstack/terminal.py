"""How reports reach people: on a terminal as wide as it is, elsewhere as wide as their tables."""

from __future__ import annotations

from typing import IO

from rich.console import Console

PIPED_WIDTH = 140


def report_console(file: IO[str] | None = None) -> Console:
    """Standard output, or `file`; square brackets of what is printed stay what they are."""
    console = Console(markup=False, highlight=False, file=file)
    return console if console.is_terminal else _piped(file)


def _piped(file: IO[str] | None) -> Console:
    return Console(markup=False, highlight=False, file=file, width=PIPED_WIDTH)
