"""What `draft eval` and `draft calibrate` have in common: options, exit codes, progress, errors.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specstack.evaluation.errors import EvaluationError
from specstack.models.heads.errors import HeadError
from specstack.training.answers import BadAnswers
from specstack.training.train_cli import Failure

BAD_INPUT, INTERRUPTED = 2, 130
EXIT_CODES = """
\b
Exit codes:
  0    done
  1    another failure
  2    the pipeline text, the answers or the options are wrong
  3    the pipeline does not fit the model
  130  interrupted; nothing is written
"""
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

pipeline = click.argument("pipeline", type=click.Path(path_type=Path), metavar="PIPELINE.yaml")
overrides = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="As in `serve`."
)
num = click.option(
    "--num", type=click.IntRange(min=1), help="Use the first NUM texts of each file."
)
holdout_share = click.option(
    "--holdout-share",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="Use only answers that a training with this answers.holdout_share does not train on.",
)
max_length = click.option(
    "--max-length",
    default=4096,
    show_default=True,
    type=click.IntRange(min=2),
    help="Tokens of prompt and answer; what is beyond is cut.",
)
batch_size = click.option("--batch-size", default=8, show_default=True, type=click.IntRange(min=1))
check_greedy = click.option(
    "--check-greedy/--no-check-greedy",
    default=None,
    help="Cut answers where the target would go on otherwise. Default: where the target "
    "is loaded anyway and the answers were not sampled.",
)
device = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
dtype = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Of the target; auto: float32 on a CPU, else bfloat16.",
)
form = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
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


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the command with the code of what went wrong, and without a traceback."""
    try:
        yield
    except (EvaluationError, BadAnswers, HeadError) as error:
        raise Failure(str(error), BAD_INPUT) from None
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
