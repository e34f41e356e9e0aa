"""Prompts of a JSONL file: one object a line, as chat messages.

A line holds `messages` (a chat that ends with the user), `turns` (user turns, of which the first is
used) or `prompt` (one user turn), and may hold an `id`; other keys are ignored. Blank lines are no
prompts and no mistakes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str

    def as_data(self) -> dict[str, str]:
        """The form of the chat APIs and of chat templates."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Prompt:
    """One prompt of a JSONL file."""

    id: str
    """The line's own, else the number of the line."""
    line: int
    """Counted from 1: what identifies the prompt within its file."""
    messages: tuple[Message, ...]
    """Not empty; the last one is the user's."""

    @property
    def text(self) -> str:
        """The last message: all there is unless the line held a chat."""
        return self.messages[-1].content

    @property
    def sha256(self) -> str:
        """A hash of the messages."""
        data = json.dumps([m.as_data() for m in self.messages], sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()


@dataclass(frozen=True)
class BadLine:
    """A line that is no prompt, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class PromptFile:
    """What was read of a file of prompts."""

    sha256: str
    """Of the whole file, whatever part of it was wanted."""
    prompts: tuple[Prompt, ...]
    bad_lines: tuple[BadLine, ...]

    @property
    def bad_share(self) -> float:
        """Bad lines among all; 0 where there are none at all."""
        return len(self.bad_lines) / max(1, len(self.prompts) + len(self.bad_lines))


def scan_prompts(path: Path, num: int | None = None) -> PromptFile:
    """Read the first `num` prompts, or all, and the bad lines between them."""
    content = path.read_bytes()
    prompts: list[Prompt] = []
    bad_lines: list[BadLine] = []
    # Not splitlines: JSON strings may hold U+2028 and other characters that it splits at.
    for number, line in enumerate(content.split(b"\n"), 1):
        if num is not None and len(prompts) == num:
            break
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line.decode()), number))
        except (ValueError, LookupError, TypeError) as error:
            reason = f"expected an object with `messages`, `turns` or `prompt`: {error!r}"
            bad_lines.append(BadLine(number, reason))
    return PromptFile(hashlib.sha256(content).hexdigest(), tuple(prompts), tuple(bad_lines))


def read_prompts(path: Path, num: int | None = None) -> list[Prompt]:
    """Read the first `num` prompts, or all.

    Raises:
        ValueError: there are none, or a line is none; names the line.
    """
    found = scan_prompts(path, num)
    if found.bad_lines:
        raise ValueError(f"{path}:{found.bad_lines[0].line}: {found.bad_lines[0].reason}")
    if not found.prompts:
        raise ValueError(f"{path}: no prompts")
    return list(found.prompts)


def _prompt(record: Any, number: int) -> Prompt:
    if not isinstance(record, dict):
        raise TypeError(f"the line is {record!r}")
    if "messages" in record:
        messages = tuple(_message(m) for m in record["messages"])
        if not messages or messages[-1].role != "user":
            raise ValueError("the messages do not end with the user's")
    else:
        if "turns" in record and not isinstance(record["turns"], list):
            raise TypeError(f"the turns are {record['turns']!r}")
        text = record["turns"][0] if "turns" in record else record["prompt"]
        messages = (_message({"role": "user", "content": text}),)
    if not messages[-1].content.strip():
        raise ValueError("the prompt is empty")
    return Prompt(str(record.get("id", number)), number, messages)


def _message(record: Any) -> Message:
    role, content = record["role"], record["content"]
    if role not in ROLES:
        raise ValueError(f"the role is {role!r}")
    if not isinstance(content, str):
        raise TypeError(f"the prompt is {content!r}")
    content.encode()  # a lone surrogate can be written in JSON, but no request can carry it
    return Message(role, content)
