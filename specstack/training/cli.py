"""`specstack draft`: what a draft head is made of.

Standard output carries the summary; progress and problems go to standard error.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import click

from specstack.evaluation.calibrate_cli import calibrate
from specstack.evaluation.cli import evaluate
from specstack.training.answer_file import InUse
from specstack.training.answers import BadAnswers
from specstack.training.chat_client import ServerUnusable, is_http_url
from specstack.training.regenerate import TooManyFailed
from specstack.training.regenerate_job import BadInput, Job, Options, open_job, run_job
from specstack.training.train_cli import Failure, train

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
EXIT_CODES = """
\b
Exit codes:
  0    every prompt is answered
  1    some prompts failed, or the run ended early; the same command goes on
  2    the prompts, the options or the recorded settings are wrong
  3    the pipeline does not fit the model, the device or SGLang
  130  interrupted; the same command goes on
"""
OWN_FIELDS = frozenset({"messages", "model", "max_tokens", "temperature", "top_p", "seed", "stream",
                        "n", "return_token_ids"})  # fmt: skip


def _json_object(context: click.Context, option: click.Parameter, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"expected an object, found {value}")
    if own := OWN_FIELDS & found.keys():
        raise click.BadParameter(f"{', '.join(sorted(own))}: set by this command itself")
    return found


@click.group()
def draft() -> None:
    """Make draft heads for a target: its own answers first, then a head trained on them."""


draft.add_command(train)
draft.add_command(evaluate)
draft.add_command(calibrate)


@draft.command(epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="ANSWERS.jsonl",
    type=click.Path(dir_okay=False, path_type=Path), help="Continued if it is there.",
)  # fmt: skip
@click.option("--url", help="An OpenAI-compatible server, up to and including /v1.")
@click.option("--pipeline", type=click.Path(path_type=Path), help="Serve this one meanwhile.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="As in `serve`.")
@click.option("--model", help="Default: the only one that the server has.")
@click.option("--api-key", envvar="SPECSTACK_API_KEY", show_envvar=True)
@click.option("--concurrency", default=32, show_default=True, type=click.IntRange(min=1))
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0.0))
@click.option(
    "--top-p", default=1.0, show_default=True, type=click.FloatRange(0.0, 1.0, min_open=True)
)
@click.option("--seed", type=int, help="A request is sent with SEED + the line of its prompt.")
@click.option(
    "--extra-body",
    metavar="JSON",
    default="{}",
    callback=_json_object,
    help="Further fields of every request.",
)
@click.option(
    "--token-ids/--no-token-ids", default=True, show_default=True,
    help="Ask for token ids with return_token_ids, which some servers refuse.",
)  # fmt: skip
@click.option("--num", type=click.IntRange(min=1), help="Use the first NUM prompts.")
@click.option(
    "--max-bad-share", default=0.01, show_default=True, type=click.FloatRange(0.0, 1.0),
    help="Lines that are no prompts are skipped up to this share.",
)  # fmt: skip
@click.option(
    "--max-failed-share", default=0.05, show_default=True, type=click.FloatRange(0.0, 1.0),
    help="Give up once more than this share of the prompts has failed.",
)  # fmt: skip
@click.option(
    "--retries", default=6, show_default=True, type=click.IntRange(min=0),
    help="After a 5xx, 429, timeout or lost connection, with growing pauses.",
)  # fmt: skip
@click.option(
    "--timeout", default=600.0, show_default=True, help="Seconds for one request.",
    type=click.FloatRange(min=0.0, min_open=True),
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
def regenerate(form: str, **given: Any) -> None:
    """Write the target's own answers to PROMPTS, a JSONL file, as training data.

    A line of PROMPTS holds `messages` (a chat), `turns` (the first is used) or `prompt`. Answers
    are appended one by one; stopped at any moment, the same command goes on where it ended. How
    they were made is in ANSWERS.meta.json, what failed and why in ANSWERS.failed.jsonl.

    \b
    Examples:
      specstack draft regenerate prompts.jsonl -o answers.jsonl --url http://127.0.0.1:30000/v1
      specstack draft regenerate prompts.jsonl -o answers.jsonl --pipeline dsl/specs/quickstart.yaml
      specstack draft regenerate prompts.jsonl -o sampled.jsonl --url http://127.0.0.1:30000/v1
        --temperature 0.8 --top-p 0.95 --seed 1 --max-tokens 1024 --num 5000
    """
    options = Options(**given)
    if (options.url is None) == (options.pipeline is None):
        raise click.UsageError("give either --url or --pipeline")
    if options.url is not None and not is_http_url(options.url):
        raise click.UsageError(f"--url {options.url}: expected http://HOST:PORT/v1")
    if options.overrides and options.pipeline is None:
        raise click.UsageError("--set changes a pipeline: give --pipeline")
    try:
        job = open_job(options)
    except BadInput as error:
        raise Failure(str(error), BAD_INPUT) from None
    if job.prompts.bad_lines:
        lines = ", ".join(str(bad.line) for bad in job.prompts.bad_lines)
        click.echo(f"skipped, no prompts: lines {lines}", err=True)
    _run(job)
    _print(job, form)
    if job.tally.failed:
        raise click.exceptions.Exit(FAILED)


def _run(job: Job) -> None:
    """Run; an early end says how to go on."""
    try:
        run_job(job)
    except KeyboardInterrupt:
        click.echo(f"interrupted: {_kept(job)}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except (BadInput, BadAnswers) as error:
        raise Failure(str(error), BAD_INPUT) from None
    except InUse as error:
        raise Failure(str(error), FAILED) from None
    except (ServerUnusable, TooManyFailed) as error:
        raise Failure(f"{error}\n{_kept(job)}", FAILED) from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = f"disk full ({error.strerror})" if full else error.strerror or str(error)
        where = error.filename or job.options.output
        raise Failure(f"cannot write {where}: {reason}\n{_kept(job)}", FAILED) from None


def _kept(job: Job) -> str:
    kept = job.num_answered_before + job.tally.answers
    return (
        f"{kept} of {len(job.prompts.prompts)} prompts are answered in {job.options.output};"
        " the same command goes on from there"
    )


def _print(job: Job, form: str) -> None:
    found = job.summary()
    if form == "json":
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(
        f"{found['answers']} answers, {found['tokens']} tokens in {found['seconds']:.1f} s"
        f" ({found['tokens_per_s']:.0f} tokens/s), {found['failed']} failed,"
        f" {len(found['skipped_lines'])} lines skipped, {found['answered_before']} answered before"
    )
    if found["cut_by_the_token_limit"]:
        click.echo(f"{found['cut_by_the_token_limit']} answers were cut by --max-tokens")
    if found["without_token_ids"]:
        click.echo(f"{found['without_token_ids']} answers came without token ids")
    if found["failures_file"]:
        click.echo(f"failed prompts and reasons: {found['failures_file']}")
    click.echo(found["answers_file"])
