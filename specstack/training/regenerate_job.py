"""One call of `specstack draft regenerate`: from its options to the files and the summary.

The summary's text and the exit codes are in `cli`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

import specstack
from specstack.applications import PIPELINE_SERVER, load
from specstack.prompts import Prompt, PromptFile, scan_prompts
from specstack.training.answer_file import AnswerFile, LineFile, writing
from specstack.training.answers_meta import (
    Meta,
    Settings,
    meta_path,
    read_meta,
    require_same,
    write_meta,
)
from specstack.training.chat_client import ChatClient
from specstack.training.progress import answer_bar
from specstack.training.regenerate import Tally, failures_path, regenerate

SHOWN_BAD_LINES = 10


@dataclass(frozen=True)
class Options:
    """The command line; `specstack draft regenerate --help` describes each."""

    prompts: Path
    output: Path
    url: str | None
    pipeline: Path | None
    overrides: tuple[str, ...]
    model: str | None
    api_key: str | None
    concurrency: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    extra_body: dict[str, Any]
    token_ids: bool
    num: int | None
    max_bad_share: float
    max_failed_share: float
    retries: int
    timeout: float


class BadInput(ValueError):
    """The files or the options do not fit together; nothing was sent."""


@dataclass
class Job:
    """A run while it goes on: whatever ends it, the summary can be made of this."""

    options: Options
    prompts: PromptFile
    tally: Tally
    num_answered_before: int = 0

    def summary(self) -> dict[str, Any]:
        """The form of `--format json`."""
        failures = failures_path(self.options.output) if self.tally.failed else None
        return {
            "answers_file": str(self.options.output),
            "failures_file": None if failures is None else str(failures),
            "prompts": len(self.prompts.prompts),
            "answered_before": self.num_answered_before,
            "answers": self.tally.answers,
            "cut_by_the_token_limit": self.tally.cut,
            "without_token_ids": self.tally.without_ids,
            "failed": self.tally.failed,
            "skipped_lines": [bad.line for bad in self.prompts.bad_lines],
            "tokens": self.tally.tokens,
            "seconds": round(self.tally.seconds, 3),
            "tokens_per_s": round(self.tally.tokens_per_s, 1),
        }


def open_job(options: Options) -> Job:
    """Read the prompts.

    Raises:
        BadInput: there are none, or too many bad lines, or they would be written over.
    """
    written = (options.output, failures_path(options.output), meta_path(options.output))
    if options.prompts.resolve() in [path.resolve() for path in written]:
        raise BadInput(f"{options.prompts} would be written over: use another file (-o)")
    found = scan_prompts(options.prompts, options.num)
    bad = found.bad_lines
    if found.bad_share > options.max_bad_share:
        lines = [f"{options.prompts}:{b.line}: {b.reason}" for b in bad[:SHOWN_BAD_LINES]]
        if len(bad) > SHOWN_BAD_LINES:
            lines.append(f"and {len(bad) - SHOWN_BAD_LINES} more")
        share = f"{found.bad_share:.2%} of the lines are no prompts"
        raise BadInput("\n".join([*lines, f"{share}; --max-bad-share is {options.max_bad_share}"]))
    if not found.prompts:
        raise BadInput(f"{options.prompts}: no prompts")
    return Job(options, found, Tally())


def run_job(job: Job) -> None:
    """Answer what is not answered yet; starts no server when that is nothing.

    Raises:
        BadInput, BadAnswers: the files or the server do not fit the options.
        InUse: another process writes to the file.
        ServerUnusable, TooManyFailed, OSError: the run ended early; answers are kept.
    """
    options = job.options
    wanted = _settings(job)
    with writing(options.output) as file:
        job.num_answered_before = sum(p.line in file.answered for p in job.prompts.prompts)
        recorded = _recorded(file, wanted)
        left = [p for p in job.prompts.prompts if p.line not in file.answered]
        if not left:
            return
        with _server(options) as url:
            asyncio.run(_ask_all(job, url, wanted, recorded, left, file))


async def _ask_all(
    job: Job,
    url: str,
    wanted: Settings,
    recorded: Meta | None,
    left: Sequence[Prompt],
    file: AnswerFile,
) -> None:
    options, num_prompts = job.options, len(job.prompts.prompts)
    async with ChatClient(
        url,
        concurrency=options.concurrency,
        timeout_s=options.timeout,
        retries=options.retries,
        api_key=options.api_key,
    ) as client:
        settings = replace(wanted, model=_served(wanted.model, await client.models(), url))
        run = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "specstack": specstack.__version__,
            "server": await client.server_info(),
        }
        if recorded is not None:
            require_same(recorded.settings, settings, options.output)
        earlier = () if recorded is None else recorded.runs
        write_meta(options.output, Meta(settings, options.prompts.name, (*earlier, run)))
        job.tally = Tally()  # the clock starts here, not with the server
        with (
            _failures(job) as failures,
            answer_bar(num_prompts, job.num_answered_before, job.tally) as on_done,
        ):
            await regenerate(
                client, left, settings, file, failures,
                concurrency=options.concurrency,
                max_failed=options.max_failed_share * num_prompts,
                tally=job.tally, on_done=on_done,
            )  # fmt: skip


def _settings(job: Job) -> Settings:
    options = job.options
    return Settings(
        model=options.model,
        prompts_sha256=job.prompts.sha256,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        token_ids=options.token_ids,
        extra_body=options.extra_body,
    )


def _recorded(file: AnswerFile, wanted: Settings) -> Meta | None:
    """Return the settings behind the answers that are there; None if there are none."""
    if not file.answered:
        return None
    meta = read_meta(file.path)
    if meta is None:
        raise BadInput(
            f"{file.path} has answers, but {meta_path(file.path)}, which says how they were made,"
            " is missing: use another file (-o)"
        )
    require_same(meta.settings, wanted, file.path)
    return meta


def _served(model: str | None, served: Sequence[str], url: str) -> str:
    names = ", ".join(served) or "nothing"
    if model is None and len(served) != 1:
        raise BadInput(f"{url} serves {names}: name one with --model")
    if model is not None and model not in served:
        raise BadInput(f"{url} does not serve {model!r}, but {names}")
    return served[0] if model is None else model


@contextmanager
def _server(options: Options) -> Iterator[str]:
    if options.pipeline is None:
        assert options.url is not None
        yield options.url
        return
    click.echo(f"starting a server of {options.pipeline}", err=True)
    start = load(PIPELINE_SERVER, needed_by="--pipeline", extra="serve")
    with start(options.pipeline, options.overrides) as url:
        yield f"{url}/v1"


@contextmanager
def _failures(job: Job) -> Iterator[LineFile]:
    """The failures of this run, in place of those of the run before; no file if there are none."""
    path = failures_path(job.options.output)
    file = LineFile(path, keep=False)
    try:
        yield file
    finally:
        file.close()
        if not job.tally.failed:
            path.unlink()
