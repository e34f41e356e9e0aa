"""The answers of a target, as JSONL: what a draft head is trained on.

One object a line, in the order in which the answers came. The keys are the fields of `Answer`.
The settings behind the answers are in a file beside them (`answers_meta`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specstack.prompts import Prompt

START = b'{"line":'
"""How every line of answers begins."""


@dataclass(frozen=True)
class Answer:
    """What the target answered to one prompt."""

    line: int
    """Of the prompt, counted from 1, in its file: unique among the answers."""
    id: str
    prompt_sha256: str
    messages: tuple[dict[str, str], ...]
    """The prompt's messages and, last, the assistant's."""
    finish_reason: str
    """"stop", or "length" where the token limit cut it."""
    prompt_tokens: int
    completion_tokens: int
    input_ids: tuple[int, ...] | None
    """The prompt as the target saw it, chat template included; None: the server does not say."""
    output_ids: tuple[int, ...] | None
    """What the target emitted, the token that ended it included; None: the server does not say."""


class BadAnswers(ValueError):
    """A file of answers, or the settings beside it, cannot be used; the text says where and why."""


class NoAnswer(ValueError):
    """A server's reply is not a usable chat completion; the text says what was found."""


def from_completion(prompt: Prompt, reply: Any) -> Answer:
    """Make the answer of a chat completion, with token ids where the server gave them.

    SGLang gives them in the choice as prompt_token_ids and response_token_ids, vLLM as token_ids
    in the choice and prompt_token_ids beside it.

    Raises:
        NoAnswer: the reply has another form.
    """
    try:
        choice = reply["choices"][0]
        message = {"role": "assistant", "content": choice["message"]["content"] or ""}
        if choice["message"].get("reasoning_content"):
            message["reasoning_content"] = choice["message"]["reasoning_content"]
        input_ids = choice.get("prompt_token_ids", reply.get("prompt_token_ids"))
        output_ids = choice.get("response_token_ids", choice.get("token_ids"))
        return Answer(
            line=prompt.line,
            id=prompt.id,
            prompt_sha256=prompt.sha256,
            messages=(*(m.as_data() for m in prompt.messages), message),
            finish_reason=str(choice["finish_reason"]),
            prompt_tokens=int(reply["usage"]["prompt_tokens"]),
            completion_tokens=int(reply["usage"]["completion_tokens"]),
            input_ids=None if input_ids is None else tuple(input_ids),
            output_ids=None if output_ids is None else tuple(output_ids),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise NoAnswer(f"not a chat completion ({error!r}): {str(reply)[:200]}") from None


def encode(record: dict[str, Any]) -> bytes:
    """One line of JSONL, its end included; ASCII, so that nothing in it is taken for a line end."""
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def to_line(answer: Answer) -> bytes:
    """The line that `read_answers` gives back as `answer`."""
    return encode(asdict(answer))


def read_answers(path: Path) -> Iterator[Answer]:
    """Read every answer; a last one without its end was being written and is left out.

    Raises:
        BadAnswers: a line is no answer, or answers the same prompt again; names the line.
    """
    seen: set[int] = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and START.startswith(line[: len(START)]):
                return
            try:
                answer = parse_answer(line)
            except BadAnswers as error:
                raise BadAnswers(f"{path}:{number}: {error}") from None
            if answer.line in seen:
                raise BadAnswers(f"{path}:{number}: a second answer to line {answer.line}")
            seen.add(answer.line)
            yield answer


def parse_answer(line: bytes) -> Answer:
    """Read one line; raises BadAnswers, without the line's place."""
    try:
        record = json.loads(line)
        for name in ("messages", "input_ids", "output_ids"):
            if record[name] is not None:
                record[name] = tuple(record[name])
        return Answer(**record)
    except (ValueError, TypeError, LookupError) as error:
        raise BadAnswers(f"not an answer: {error!r}") from None
