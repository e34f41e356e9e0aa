"""`specstack draft calibrate`. Torch is imported when it runs.

Standard output carries the summary; progress and problems go to standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from specstack.applications import load
from specstack.calibration_file import CalibrationFile
from specstack.evaluation import cli_options as options
from specstack.terminal import report_console


@click.command(epilog=options.EXIT_CODES, context_settings={"max_content_width": 100})
@options.pipeline
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="CALIBRATION.json",
    help="Its folder is made if need be.",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
)
@click.option(
    "--answers",
    multiple=True,
    required=True,
    type=options.FILE,
    help="The target's own. May be repeated.",
)
@options.overrides
@click.option(
    "--budget",
    default=63,
    show_default=True,
    type=click.IntRange(1, 1023),
    help="Drafts per round: more of them reach places that are seldom right.",
)
@click.option(
    "--ranks",
    default=8,
    show_default=True,
    type=click.IntRange(1, 256),
    help="Siblings told apart; the last factor is that of all further ones.",
)
@click.option(
    "--prior",
    default=8.0,
    show_default=True,
    type=click.FloatRange(0.0, min_open=True),
    help="Drafts that are added to every place, right as often as the drafter says.",
)
@options.num
@options.holdout_share
@options.max_length
@options.batch_size
@options.check_greedy
@options.device
@options.dtype
@options.form
def calibrate(output: Path, form: str, **given: Any) -> None:
    """Measure how far the probabilities of the drafter of PIPELINE.yaml are off, place by place.

    A place is a depth, a rank among siblings, and whether the parent is on the spine: the path of
    the best guess each time. Replays answers as `draft eval` does, with large trees of the best
    paths. Writes the factors into the file that a tree's option `calibration` names.

    \b
    Examples:
      specstack draft calibrate my.yaml --answers answers.jsonl -o calibration.json
      specstack draft calibrate my.yaml --answers answers.jsonl -o calibration.json
        --holdout-share 0.02 --budget 127 --prior 20
    """
    try:  # before the work, not after it
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--output") from None
    work, made = _import("calibrate:calibrate"), _import("calibrate:CalibrateOptions")
    with options.exit_codes(), options.progress_bars() as bar:
        found = work(made(**given), bar)
    output.write_text(found.file.as_text(), "utf-8")
    if form == "json":
        click.echo(found.file.as_text(), nl=False)
        return
    _show(found.file, found.notes, report_console())
    click.echo(output)


def _import(name: str) -> Any:
    return load(f"specstack.evaluation.{name}", needed_by="draft calibrate", extra="train")


def _show(file: CalibrationFile, notes: Sequence[str], console: Console) -> None:
    ranks = len(file.log_factor[0])
    header = [*map(str, range(ranks - 1)), f"{ranks - 1} and up"]
    for on_spine, title in ((1, "parent on the spine"), (0, "parent off the spine")):
        table = Table("depth", *header, title=f"factor of q by rank (drafts), {title}")
        for depth, (factors, reached) in enumerate(
            zip(file.log_factor, file.reached, strict=True), 1
        ):
            cells = [
                f"{math.exp(factor[on_spine]):.2f} ({num[on_spine]})" if num[on_spine] else "-"
                for factor, num in zip(factors, reached, strict=True)
            ]
            if set(cells) != {"-"}:
                table.add_row(str(depth), *cells)
        if table.row_count:
            console.print(table)
    for note in notes:
        console.print(note)
