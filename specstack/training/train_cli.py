"""`specstack draft train`. Torch is imported when it runs.

Standard output carries the summary; steps and problems go to standard error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specstack.applications import load
from specstack.models.heads.errors import HeadError
from specstack.training.answer_file import InUse
from specstack.training.answers import BadAnswers
from specstack.training.errors import RunError
from specstack.training.run_file import load_run

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
EXIT_CODES = """
\b
Exit codes:
  0    done
  1    another failure: a disk is full, another process trains there
  2    the run, its answers or the recorded settings are wrong
  130  interrupted, with a checkpoint; the same command goes on
"""


class Failure(click.ClickException):
    """An end with a message, no traceback, and this exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code  # type: ignore[misc]  # click declares it for the class


@click.command(epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN.yaml")
@click.option(
    "-o", "--output", required=True, metavar="FOLDER", help="Continued if it is there.",
    type=click.Path(file_okay=False, path_type=Path),
)  # fmt: skip
@click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE",
    help="Override one value, for example --set optimiser.lr=3e-4. May be repeated.",
)  # fmt: skip
@click.option("--stop-at", type=click.IntRange(min=1), help="End after this step of the run.")
@click.option("--check", is_flag=True, help="Check RUN.yaml and do nothing else.")
def train(
    run: Path, output: Path, overrides: tuple[str, ...], stop_at: int | None, check: bool
) -> None:
    """Train a draft head on regenerated answers.

    Writes checkpoints, log.csv, holdout.csv, plots and, at the end, head/ into FOLDER. Stopped at
    any moment, the same command goes on after the last checkpoint, to the bit.

    \b
    Examples:
      specstack draft train run.yaml -o head1
      specstack draft train run.yaml -o head2 --set optimiser.lr=3e-4 --set schedule.max_steps=500
      torchrun --nproc-per-node 4 -m specstack draft train run.yaml -o head3
    """
    file = load_run(run, overrides)
    if check:
        click.echo(f"{run}: ok")
        return
    work: Any = load("specstack.training.train:train", needed_by="draft train", extra="train")
    interrupted: Any = load(
        "specstack.training.trainer:Interrupted", needed_by="draft train", extra="train"
    )
    try:
        done = work(file, output, stop_at, lambda text: click.echo(text, err=True))
    except (RunError, BadAnswers, HeadError) as error:
        raise Failure(str(error), BAD_INPUT) from None
    except InUse as error:
        raise Failure(str(error), FAILED) from None
    except interrupted:
        click.echo("interrupted; the same command goes on", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if done is None:
        return
    length = "" if done.accept_length is None else f", accept length {done.accept_length:.3f}"
    click.echo(
        f"{done.steps} of {done.num_steps} steps, {done.answer_tokens} answer tokens{length}"
    )
    click.echo(done.head if done.head is not None else f"go on with the same command: {output}")
