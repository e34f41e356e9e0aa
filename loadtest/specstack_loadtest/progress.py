"""How a run goes: numbers of the moment, changing on a terminal, else as a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specstack_loadtest.arrivals import phases_of
from specstack_loadtest.scenario import Scenario

PLAIN_S = 10.0
"""Between two lines where nothing can change."""


@dataclass(frozen=True)
class Snapshot:
    """A run at a moment. What is not known yet, or by this server, is None."""

    seconds: float
    """Since the load began; below 0 before."""
    phase: int | None
    """Number of the one under way; None: it has not begun, or what is left is answered."""
    share_done: float | None
    """Of the whole run."""
    num_done: int
    """Requests that ended, errors included."""
    num_errors: int
    num_in_flight: int | None
    tokens_per_s: float | None
    """Of the answers that ended in the last seconds."""
    ttft_p50_s: float | None
    """Of the same."""
    draft_budget: int | None


Report = Callable[[Snapshot], None]


@contextmanager
def live_display(
    scenario: Scenario, console: Console | None = None
) -> Iterator[Callable[[str], Report]]:
    """Show runs of a scenario on standard error; yields (title of a run) -> what is told of it."""
    phases = tuple(phase.name for phase in phases_of(scenario))
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda title: _plain(console, title, phases)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def display(title: str) -> Report:
            live.update(Text(f"{title}: starting"))
            return lambda snapshot: live.update(table_of(title, phases, snapshot))

        yield display


def table_of(title: str, phases: tuple[str, ...], snapshot: Snapshot) -> Table:
    """What a terminal shows."""
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=snapshot.share_done or 0.0, width=24)
    table.add_row(Text(title, "bold"), bar, Text(_place(phases, snapshot)))
    numbers = Table.grid(padding=(0, 2))
    numbers.add_row(*(Text(words) for words in _numbers(snapshot)))
    whole = Table.grid()
    whole.add_row(table)
    whole.add_row(numbers)
    return whole


def line_of(title: str, phases: tuple[str, ...], snapshot: Snapshot) -> str:
    """The same in one line."""
    return ", ".join([f"{title}: {_place(phases, snapshot)}", *_numbers(snapshot)])


def _plain(console: Console, title: str, phases: tuple[str, ...]) -> Report:
    said_at = -PLAIN_S

    def report(snapshot: Snapshot) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= PLAIN_S:
            said_at = time.monotonic()
            line = line_of(title, phases, snapshot)
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return report


def _place(phases: tuple[str, ...], snapshot: Snapshot) -> str:
    if snapshot.phase is None:
        return "starting" if snapshot.seconds < 0 else f"{snapshot.seconds:.0f} s, last answers"
    words = f"{snapshot.seconds:.0f} s, {phases[snapshot.phase]}"
    return words if len(phases) == 1 else f"{words} ({snapshot.phase + 1} of {len(phases)})"


def _numbers(snapshot: Snapshot) -> list[str]:
    errors = "error" if snapshot.num_errors == 1 else "errors"
    words = [f"{snapshot.num_done} done", f"{snapshot.num_errors} {errors}"]
    if snapshot.num_in_flight is not None:
        words.append(f"{snapshot.num_in_flight} in flight")
    if snapshot.tokens_per_s is not None:
        words.append(f"{snapshot.tokens_per_s:.0f} tokens/s")
    if snapshot.ttft_p50_s is not None:
        words.append(f"first token after {snapshot.ttft_p50_s * 1000:.0f} ms")
    if snapshot.draft_budget is not None:
        words.append(f"budget {snapshot.draft_budget}")
    return words
