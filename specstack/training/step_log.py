"""What a run says of every step: a line on standard error, on a terminal a bar below it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class StepLog:
    """Says where a run is; silent in all processes but the first."""

    def __init__(self, first_step: int, num_steps: int, every: int, *, is_first: bool) -> None:
        self.num_steps, self.every = num_steps, every
        self.console = Console(stderr=True, markup=False, highlight=False, quiet=not is_first)
        self._progress = Progress(
            TextColumn("steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (self.console.is_terminal and is_first),
        )
        self._task = self._progress.add_task("steps", total=num_steps, completed=first_step)
        self._first, self._started = first_step, time.monotonic()

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Show the bar."""
        with self._progress:
            yield

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, soft_wrap=True)

    def step(self, done: int, values: Mapping[str, float], depth_losses: list[float]) -> None:
        """Report a step; `done` counts it."""
        self._progress.update(self._task, completed=done)
        if done % self.every and done != self.num_steps:
            return
        per_step = (time.monotonic() - self._started) / (done - self._first)
        left = timedelta(seconds=round(per_step * (self.num_steps - done)))
        depths = " ".join(f"{loss:.2f}" for loss in depth_losses)
        self.say(
            f"step {done}/{self.num_steps} loss {values['loss']:.4f} [{depths}]"
            f" lr {values['lr']:.2e} norm {values['grad_norm']:.2f}"
            f" {values['tokens_per_s']:.0f} tokens/s, {left} left"
        )
