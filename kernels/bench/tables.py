"""How results look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_tests import FileOutcome
from harness import Timing
from results import Bounds, Result
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from targets import Target

STYLES = {"met": "green", "missed": "red", "not measured": "yellow"}
NONE = "-"
MAX_REASON = 100


def progress(console: Console) -> Progress:
    """A bar with what is under way; gone when it is over."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    return Progress(*columns, console=console, transient=True)


def show_outcome(outcome: FileOutcome, console: Console) -> None:
    """A line per file that did not pass."""
    if not outcome.is_finished:
        console.print(f"[yellow]{outcome.file}: not over after {outcome.seconds:.0f} s[/]")
    for failure in outcome.failures:
        console.print(f"[red]{outcome.file}[/] {escape(failure)}", soft_wrap=True)


def show_results(name: str, results: Sequence[Result], bounds: Bounds, console: Console) -> None:
    """A table of one benchmark."""
    table = Table(title=name, title_justify="left")
    table.add_column("op and shape")
    for heading in ("ms", "host ms", "GB/s", "of copy", "of bound"):
        table.add_column(heading, justify="right")
    table.add_column("beside it: ms (ours / theirs)")
    for result in results:
        timing = result.timing
        if timing is None:
            reason = f"[red]{escape((result.error or '')[:MAX_REASON])}[/]"
            table.add_row(f"{result.op} {escape(result.shape)}", *[NONE] * 5, reason)
            continue
        table.add_row(
            f"{result.op} {escape(result.shape)}",
            f"{timing.ms:.4f}",
            f"{timing.host_ms:.4f}",
            f"{result.gb_per_s() or 0:.1f}",
            _percent(result.share_of_copy(bounds)),
            _percent(result.share_of_bound(bounds)),
            "\n".join(_rival(result, rival) for rival in result.rivals) or NONE,
        )
    console.print(table)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def _rival(result: Result, name: str) -> str:
    theirs = result.rivals[name]
    if isinstance(theirs, Timing):
        return f"{name} {theirs.ms:.4f} ({result.ratio(name):.2f})"
    reason = theirs.partition("\n")[0][:MAX_REASON]
    return f"{name} [yellow]{escape(reason)}[/]"


def show_targets(
    targets: Sequence[Target], failures: Sequence[str], left_out: Sequence[str], console: Console
) -> None:
    """What failed, what was left out, then the verdicts with their numbers."""
    for failure in failures:
        console.print(f"[red]failed[/] {escape(failure)}", soft_wrap=True)
    for name in left_out:
        console.print(f"[yellow]left out[/] {escape(name)}", soft_wrap=True)
    for target in targets:
        verdict = f"[{STYLES[target.verdict]}]{target.verdict}[/]"
        console.print(f"{verdict}: {escape(target.claim)}: {escape(target.number)}", soft_wrap=True)
        for detail in target.details:
            console.print(f"    {escape(detail)}", soft_wrap=True)
