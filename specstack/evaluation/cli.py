"""`specstack draft eval`. Torch is imported when it runs.

Standard output carries the summary; progress and problems go to standard error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specstack.applications import load
from specstack.evaluation.errors import EvaluationError
from specstack.models.heads.errors import HeadError
from specstack.training.answers import BadAnswers
from specstack.training.train_cli import Failure

BAD_INPUT, INTERRUPTED = 2, 130
PIPED_WIDTH = 140
EXIT_CODES = """
\b
Exit codes:
  0    done
  1    another failure
  2    the pipeline text, the answers or the options are wrong
  3    the pipeline does not fit the model
  130  interrupted; nothing is written
"""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("eval", epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.argument("pipeline", type=click.Path(path_type=Path), metavar="PIPELINE.yaml")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FOLDER",
    help="Made if need be.",
    type=click.Path(file_okay=False, path_type=Path),
)
@click.option("--answers", multiple=True, type=_FILE, help="The target's own. May be repeated.")
@click.option("--prompts", multiple=True, type=_FILE, help="The target answers them first.")
@click.option(
    "--sources",
    type=_FILE,
    metavar="PROMPTS.jsonl",
    help="The prompts of --answers: their field `source` names the data set.",
)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="As in `serve`.")
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
@click.option("--num", type=click.IntRange(min=1), help="Use the first NUM texts of each file.")
@click.option(
    "--holdout-share",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="Use only answers that a training with this answers.holdout_share does not train on.",
)
@click.option(
    "--max-length",
    default=4096,
    show_default=True,
    type=click.IntRange(min=2),
    help="Tokens of prompt and answer; what is beyond is cut.",
)
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(min=1))
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
@click.option(
    "--check-greedy/--no-check-greedy",
    default=None,
    help="Cut answers where the target would go on otherwise. Default: where the target "
    "is loaded anyway and the answers were not sampled.",
)
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
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Of the target; auto: float32 on a CPU, else bfloat16.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text",
              show_default=True)  # fmt: skip
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
    make_job, options = _import("job:Job"), _import("job:Options")
    try:
        with _bars() as bar:
            report = make_job(options(**given)).run(bar)
    except (EvaluationError, BadAnswers, HeadError) as error:
        raise Failure(str(error), BAD_INPUT) from None
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    _import("output:write")(report, output)
    _print(report, output, form)


def _import(name: str) -> Any:
    return load(f"specstack.evaluation.{name}", needed_by="draft eval", extra="train")


def _print(report: Any, folder: Path, form: str) -> None:
    if form == "json":
        click.echo(json.dumps(report.as_data(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=PIPED_WIDTH)
    _import("tables:show")(report, console)
    click.echo(folder / "report.md")


@contextmanager
def _bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Bars on standard error, on a terminal only."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    def bar(name: str, total: int) -> Callable[[int], None]:
        task = progress.add_task(name, total=total)
        return lambda steps: progress.advance(task, steps)

    with progress:
        yield bar
