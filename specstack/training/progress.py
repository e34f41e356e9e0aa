"""How far a run is: a bar with tokens per second and the time that is left, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specstack.training.regenerate import Tally


@contextmanager
def answer_bar(total: int, done: int, tally: Tally) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error; what it yields is to be called after every prompt.

    `done` of `total` prompts were answered before; `tally` counts those of this run.
    """
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = progress.add_task("answers", total=total, completed=done, rate=0.0, failed=0)

    def advance() -> None:
        progress.update(task, advance=1, rate=tally.tokens_per_s, failed=tally.failed)

    with progress:
        yield advance
