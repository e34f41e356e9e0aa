"""`specstack draft eval`. Torch is imported when it runs.

Standard output carries the summary; progress and problems go to standard error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specstack.applications import load
from specstack.evaluation import cli_options as options
from specstack.terminal import report_console


@click.command("eval", epilog=options.EXIT_CODES, context_settings={"max_content_width": 100})
@options.pipeline
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FOLDER",
    help="Made if need be.",
    type=click.Path(file_okay=False, path_type=Path),
)
@click.option(
    "--answers", multiple=True, type=options.FILE, help="The target's own. May be repeated."
)
@click.option("--prompts", multiple=True, type=options.FILE, help="The target answers them first.")
@click.option(
    "--sources",
    type=options.FILE,
    metavar="PROMPTS.jsonl",
    help="The prompts of --answers: their field `source` names the data set.",
)
@options.overrides
@click.option("--tree", "trees", multiple=True, metavar="KIND", help="Default: the pipeline's.")
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    type=click.IntRange(1, 1023),
    help="Drafts per round. Default: what the pipeline's policy gives.",
)
@click.option(
    "--min-survival",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0.0, 1.0, max_open=True),
    help="Price of a node of --budget.",
)
@click.option(
    "--load",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Running requests that the pipeline's policy is asked for.",
)
@options.num
@options.holdout_share
@options.max_length
@options.batch_size
@click.option("--live", is_flag=True, help="Verify with the target in every round: slow.")
@click.option(
    "--temperature",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0.0),
    help="Of answers to --prompts, and of --live.",
)
@click.option(
    "--top-p", default=1.0, show_default=True, type=click.FloatRange(0.0, 1.0, min_open=True)
)
@click.option(
    "--max-tokens",
    default=256,
    show_default=True,
    type=click.IntRange(min=2),
    help="Of answers to --prompts, and of --live.",
)
@options.check_greedy
@click.option(
    "--bound",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Positions at which to search for the best tree, at temperature > 0.",
)
@click.option(
    "--draws",
    default=1000,
    show_default=True,
    type=click.IntRange(min=100),
    help="Of the bootstrap.",
)
@click.option("--seed", default=0, show_default=True)
@options.device
@options.dtype
@options.form
def evaluate(output: Path, form: str, **given: Any) -> None:
    """Measure how well the drafter of PIPELINE.yaml drafts: no server, no clock.

    Rounds are those of serving; the target's own answers stand for its forwards. Writes report.md,
    report.json and plots into FOLDER.

    \b
    Examples:
      specstack draft eval dsl/specs/quickstart.yaml --answers answers.jsonl -o eval1
      specstack draft eval my.yaml --answers answers.jsonl -o eval2
        --tree chain --tree best_first --budget 3 --budget 7 --budget 15
      specstack draft eval my.yaml --prompts prompts.jsonl --temperature 0.8 -o eval3
    """
    if bool(given["answers"]) == bool(given["prompts"]):
        raise click.UsageError("give either --answers or --prompts")
    if given["prompts"] and (given["check_greedy"] or given["sources"] or given["holdout_share"]):
        raise click.UsageError("--check-greedy, --sources and --holdout-share are for --answers")
    compare, made = _import("compare:compare"), _import("job:Options")
    with options.exit_codes(), options.progress_bars() as bar:
        report = compare(made(**given), bar)
    _import("output:write")(report, output)
    _print(report, output, form)


def _import(name: str) -> Any:
    return load(f"specstack.evaluation.{name}", needed_by="draft eval", extra="train")


def _print(report: Any, folder: Path, form: str) -> None:
    if form == "json":
        click.echo(json.dumps(report.as_data(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    _import("tables:show")(report, report_console())
    click.echo(folder / "report.md")
