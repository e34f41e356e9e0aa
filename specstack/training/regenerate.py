"""Answers to many prompts: so many in flight, each written down as soon as it is there.

Stopped at any moment (an interrupt, a signal that cannot be caught, a full disk), the same call
goes on where it ended: answered prompts are skipped, failed ones are tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specstack.prompts import Prompt
from specstack.training.answer_file import LineFile
from specstack.training.answers import encode, to_line
from specstack.training.answers_meta import Settings
from specstack.training.chat_client import ChatClient, PromptFailed


class TooManyFailed(RuntimeError):
    """More prompts failed than the caller accepts."""


@dataclass
class Tally:
    """Counts of one run, kept while it goes on."""

    answers: int = 0
    tokens: int = 0
    """Emitted by the target."""
    cut: int = 0
    """Answers that the token limit ended."""
    without_ids: int = 0
    """Answers whose token ids the server did not give."""
    failed: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the run started."""
        return time.monotonic() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Over the whole run."""
        return self.tokens / max(self.seconds, 1e-9)


def failures_path(answers: Path) -> Path:
    """Where the prompts that failed in the last run are, with the reasons."""
    return answers.with_suffix(".failed.jsonl")


async def regenerate(
    client: ChatClient,
    prompts: Sequence[Prompt],
    settings: Settings,
    answers: LineFile,
    failures: LineFile,
    *,
    concurrency: int,
    max_failed: float,
    tally: Tally,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Ask for every prompt and write each answer to `answers`, in the order of completion.

    `tally` is kept up to date and `on_done` called after every prompt, so that a caller knows
    the state whatever ends the call.

    Raises:
        TooManyFailed: more than `max_failed` prompts did.
        ServerUnusable: the server is gone, or refuses whatever it is asked.
        OSError: a file cannot be written to; it ends with a whole line.
    """
    waiting = iter(prompts)

    async def work(waiting: Iterator[Prompt]) -> None:
        for prompt in waiting:
            try:
                answer = await client.answer(prompt, settings)
            except PromptFailed as error:
                tally.failed += 1
                failures.append(
                    encode({"line": prompt.line, "id": prompt.id, "reason": str(error)})
                )
                if tally.failed > max_failed:
                    raise TooManyFailed(
                        f"{tally.failed} prompts failed, the last one with: {error}"
                    ) from None
            else:
                answers.append(to_line(answer))
                tally.answers += 1
                tally.tokens += answer.completion_tokens
                tally.cut += answer.finish_reason == "length"
                tally.without_ids += answer.output_ids is None
            on_done()

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(prompts))):
                workers.create_task(work(waiting))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
