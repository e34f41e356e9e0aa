"""`specstack simulate`. Standard output carries the results; progress goes to standard error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specstack.budget.costs import CostTableError
from specstack.metrics.trace import TraceError
from specstack.simulation.errors import SimulationError
from specstack.simulation.job import Bar, Options, Report, run_job
from specstack.simulation.loads import LoadOptions
from specstack.simulation.profiles import PROFILES
from specstack.terminal import report_console

COLUMNS: dict[str, tuple[str, float, int]] = {
    "tokens_per_s": ("tokens/s", 1, 1),
    "mean_tpot_ms": ("TPOT ms", 1, 2),
    "p99_tpot_ms": ("p99", 1, 2),
    "p50_ttft_ms": ("TTFT ms", 1, 1),
    "p99_ttft_ms": ("p99", 1, 1),
    "mean_budget": ("budget", 1, 1),
    "num_switches": ("switches", 1, 0),
    "share_off": ("off %", 100, 1),
    "wasted_drafts": ("wasted", 1, 0),
    "regret": ("regret %", 100, 2),
    "speedup": ("speedup", 1, 2),
}
"""Measure -> heading, factor, digits."""


class _Fraction(click.ParamType[Fraction]):
    name = "fraction"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            fraction = Fraction(value)
        except (ValueError, ZeroDivisionError):
            fraction = Fraction(0)
        if fraction <= 0:
            self.fail(f"expected a number above 0, for example 1/16, found {value!r}", param, ctx)
        return fraction


class _Choices(click.ParamType[tuple[int, ...]]):
    name = "choices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            choices = tuple(map(int, value.split(",")))
        except ValueError:
            choices = ()
        if len(choices) < 2 or choices[0] != 0 or list(choices) != sorted(set(choices)):
            self.fail(f"expected budgets rising from 0, for example 0,3,7, found {value!r}", param)
        return choices


@click.command(context_settings={"max_content_width": 100})
@click.argument("trace", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--policies", default="plain,goodput,oracle", show_default=True, metavar="LIST",
              help="plain, oracle, fixed:7, table:2=15:8=3, ema, goodput:hysteresis=0,"
                   " slo:tpot_ms=20, or pipeline files.")  # fmt: skip
@click.option("--costs", default=next(iter(PROFILES)), show_default=True, metavar="FILE|PROFILE",
              help="What rounds take: a file of `specstack bench cost`, or a profile.")  # fmt: skip
@click.option("--believed-costs", metavar="FILE|PROFILE",
              help="What policies are told that rounds take. Default: the truth.")  # fmt: skip
@click.option("--padded", is_flag=True, help="With a file of costs: drafts that are not verified"
              " cost as much as others (captured graphs).")  # fmt: skip
@click.option("--load", metavar="LOAD", help="closed:16, steps:1,16,1 (requests in flight),"
              " poisson:RATE, burst:RATE[,SHAPE] (per second), trace:FILE.csv, trace:FILE.jsonl."
              " Default: that of TRACE.")  # fmt: skip
@click.option("--acceptance", metavar="B=LENGTH,..", help="Accept lengths by budget. Default: the"
              " rounds of TRACE, or the profile's.")  # fmt: skip
@click.option("--optimism", default=1.0, show_default=True, type=click.FloatRange(0.1, 10.0),
              help="Above 1 the drafter promises more than --acceptance keeps.")  # fmt: skip
@click.option("--choices", type=_Choices(), metavar="0,B,..", help="Default: those of --costs.")
@click.option("--max-requests", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--max-running", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--prompt-tokens", default=256, show_default=True, type=click.IntRange(min=1),
              help="Mean of made up prompts.")  # fmt: skip
@click.option("--output-tokens", default=128, show_default=True, type=click.IntRange(min=1),
              help="Mean of made up answers.")  # fmt: skip
@click.option("--scale-lengths", default="1", show_default=True, type=_Fraction(),
              help="Factor of the lengths in a file of arrivals, for example 1/16.")  # fmt: skip
@click.option("--scale-time", default=1.0, show_default=True,
              type=click.FloatRange(min=0, min_open=True),
              help="Factor of its times: below 1 requests come faster.")  # fmt: skip
@click.option("--prefill-ms-per-token", type=click.FloatRange(min=0, min_open=True),
              help="Default: what a token of the costs' largest cell takes.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("-o", "--output", metavar="FOLDER", help="For results.json and plots.",
              type=click.Path(file_okay=False, path_type=Path))  # fmt: skip
@click.option("--format", "form", default="table", show_default=True,
              type=click.Choice(["table", "json"]))  # fmt: skip
def simulate(output: Path | None, form: str, **given: Any) -> None:
    """Compare budget policies on a simulated server: no model, no clock.

    TRACE is what a server recorded (a file, or a folder with `metrics.trace`). All policies see the
    same requests and the same drafts. Regret is the share of the time in rounds that an oracle
    would have saved, which knows what the coming round's drafts are worth.

    \b
    Examples:
      specstack simulate --load closed:16 --policies plain,fixed:32,goodput,oracle
      specstack simulate --load steps:1,16,1 -o steps
      specstack simulate --load trace:azure_llm_2023_code.csv --scale-lengths 1/4 --scale-time 0.5
      specstack simulate traces/ --costs costs.json --policies plain,fixed:3,goodput
    """
    names = (
        "max_requests",
        "prompt_tokens",
        "output_tokens",
        "scale_lengths",
        "scale_time",
        "seed",
    )
    load_options = LoadOptions(**{name: given.pop(name) for name in names})
    try:
        with _bars() as bar:
            report = run_job(Options(load_options=load_options, **given), bar)
    except (SimulationError, TraceError, CostTableError) as error:
        raise click.UsageError(str(error)) from error
    if output is not None:
        _write(report, output)
    if form == "json":
        click.echo(_json(report))
    else:
        _show(report)


def _json(report: Report) -> str:
    return json.dumps(report.as_data(), indent=2, ensure_ascii=False, allow_nan=False)


def _write(report: Report, folder: Path) -> None:
    from specstack.simulation.plots import plot

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(_json(report) + "\n", "utf-8")
    plot(report, folder)


def _show(report: Report) -> None:
    table = Table(title=f"{report.settings['load']}, {report.settings['num_requests']} requests")
    table.add_column("policy")
    for heading, _, _ in COLUMNS.values():
        table.add_column(heading, justify="right")
    for name in report.runs:
        measures = report.measures(name)
        table.add_row(name, *(_cell(measures[key], *how[1:]) for key, how in COLUMNS.items()))
    report_console().print(table)


def _cell(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


@contextmanager
def _bars() -> Iterator[Bar]:
    console = Console(stderr=True)
    progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                        TimeRemainingColumn(), console=console,
                        disable=not console.is_terminal)  # fmt: skip

    def bar(name: str, total: int) -> Callable[[int], None]:
        task = progress.add_task(name, total=total)
        return lambda done: progress.update(task, completed=done)

    with progress:
        yield bar
