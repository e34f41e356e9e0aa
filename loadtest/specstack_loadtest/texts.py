"""The texts of a workload: prompts of files, each in its turn, and filler of any length.

Both come from the prompt files alone, by seeded draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specstack.prompts import Message, read_prompts
from specstack_loadtest.lengths import cut
from specstack_loadtest.seeds import Purpose, random_of

T = TypeVar("T")

GAP = "\n\n"
"""Between paragraphs."""


@dataclass(frozen=True)
class Script:
    """What a line of a prompt file says."""

    opening: tuple[Message, ...]
    """Up to the first answer; the last message is the user's."""
    later: tuple[str, ...] = ()
    """What the user says after each answer, where the line has `turns`."""

    @property
    def text(self) -> str:
        """The user's own first text."""
        return self.opening[-1].content


def read_scripts(path: Path) -> tuple[Script, ...]:
    """Read a prompt file (see `specstack.prompts`) with all turns of its lines.

    Raises:
        ValueError: a line is no prompt, or there is none; names file and line.
        OSError: it cannot be read.
    """
    lines = path.read_bytes().split(b"\n")
    scripts = []
    for prompt in read_prompts(path):
        later = _later_turns(json.loads(lines[prompt.line - 1]))
        if not all(isinstance(turn, str) and turn.strip() for turn in later):
            raise ValueError(f"{path}:{prompt.line}: expected `turns` that are texts, none empty")
        scripts.append(Script(prompt.messages, later))
    return tuple(scripts)


def _later_turns(record: dict[str, Any]) -> tuple[Any, ...]:
    return () if "messages" in record else tuple(record.get("turns", ()))[1:]


def _shuffled(items: Sequence[T], random: np.random.Generator) -> list[T]:
    return [items[place] for place in random.permutation(len(items))]


class PromptOrder:
    """Which prompt a conversation begins with.

    Files take turns. Within a file a phase goes round in a shuffled order, so none comes again
    before all have been; phases begin as far apart as they can, so that what an earlier phase
    left in a cache helps a later one as late as possible.
    """

    def __init__(self, files: Sequence[Sequence[Script]], num_phases: int, seed: int) -> None:
        self._num_phases = num_phases
        self._files = [
            _shuffled(file, random_of(seed, Purpose.PROMPT_ORDER, number))
            for number, file in enumerate(files)
        ]

    def script(self, phase: int, index: int) -> Script:
        """That of the conversation `index` of a phase."""
        round_number, number = divmod(index, len(self._files))
        file = self._files[number]
        return file[(phase * len(file) // self._num_phases + round_number) % len(file)]

    def others(self, script: Script, random: np.random.Generator) -> Iterator[str]:
        """Texts of the other prompts in a drawn order, again and again; its own if it is alone."""
        texts = [other.text for other in self._all if other is not script] or [script.text]
        yield from cycle(_shuffled(texts, random))

    @cached_property
    def _all(self) -> list[Script]:
        return [script for file in self._files for script in file]


class Filler:
    """Text of any length, made of paragraphs in a drawn order, again and again.

    Texts of different titles differ within these. A shorter text of the same title and draws is
    the beginning of a longer one.
    """

    def __init__(self, paragraphs: Iterable[str]) -> None:
        self._paragraphs = [text.strip() for text in paragraphs]

    def text(self, title: str, num_chars: int, random: np.random.Generator) -> str:
        """At most so many characters, to a whole word."""
        parts, length = [title], len(title)
        while length < num_chars:
            for paragraph in _shuffled(self._paragraphs, random):
                parts.append(paragraph)
                length += len(GAP) + len(paragraph)
        return cut(GAP.join(parts), num_chars)
