"""How reports reach people: on a terminal as wide as it is, elsewhere as wide as their tables."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 140


def report_console() -> Console:
    """Standard output; square brackets of what is printed stay what they are."""
    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        return console
    return Console(markup=False, highlight=False, width=PIPED_WIDTH)
