"""What requests ask: every conversation of a scenario, each on its own, in any order.

A conversation depends on the scenario, its seed, its phase and its index alone. So every worker
makes its share without the others, and all sides of a comparison are asked the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np

from specstack.prompts import Message
from specstack.request_traces import PREFIX_BLOCK_TOKENS, TracedRequest
from specstack_loadtest.arrivals import phases_of, traced_requests
from specstack_loadtest.lengths import chars_of, cut, draw_length
from specstack_loadtest.scenario import Scenario, Trace
from specstack_loadtest.seeds import Purpose, random_of, request_seed
from specstack_loadtest.texts import GAP, Filler, PromptOrder, Script, read_scripts


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    messages: tuple[dict[str, str], ...]
    """Those that come before this answer and after the answer before it."""
    max_tokens: int
    temperature: float
    seed: int
    response_format: dict[str, Any] | None
    """As in the OpenAI API."""
    exact_output: bool
    """Whether the answer goes on to exactly `max_tokens`."""
    think_s: float
    """What passes between the answer before it and this request; 0 for the first."""


@dataclass(frozen=True)
class Conversation:
    """Turns that one user sends one after the other."""

    phase: int
    index: int
    turns: tuple[Turn, ...]


class Workload:
    """The conversations of a scenario.

    Raises:
        ValueError, OSError: a file of the scenario cannot be read.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._work = work = scenario.workload
        files = [read_scripts(scenario.resolve(name)) for name in work.prompts]
        self._order = PromptOrder(files, len(phases_of(scenario)), scenario.seed)
        self._filler = Filler(script.text for file in files for script in file)
        self._block_tokens = 0.0
        self._traced: Sequence[TracedRequest] | None = None
        if isinstance(scenario.arrivals, Trace):
            self._block_tokens = PREFIX_BLOCK_TOKENS * scenario.arrivals.scale_lengths
            self._traced = traced_requests(scenario, scenario.arrivals)
        shares = np.array([share.share for share in work.temperature])
        self._temperature_ends = np.cumsum(shares / shares.sum())
        self._prefix = cache(self._make_prefix)
        self._response_format = None if work.structured is None else {
            "type": "json_schema",
            "json_schema": {
                "name": work.structured.name,
                "schema": work.structured.json_schema,
                "strict": True,
            },
        }  # fmt: skip

    def request(self, phase: int, index: int) -> Conversation:
        """The conversation `index` of a phase.

        Raises:
            IndexError: a trace has fewer requests.
        """
        script = self._order.script(phase, index)
        others = self._order.others(script, self._random(Purpose.FURTHER_TURNS, phase, index))
        later = islice(chain(script.later, others), self._work.turns - 1)
        said = [self._opening(script, phase, index), *([Message("user", text)] for text in later)]
        temperature = self._temperature(phase, index)
        turns = (
            Turn(
                messages=tuple(message.as_data() for message in messages),
                max_tokens=self._max_tokens(phase, index, turn),
                temperature=temperature,
                seed=request_seed(self._scenario.seed, phase, index, turn),
                response_format=self._response_format,
                exact_output=self._work.exact_output,
                think_s=self._work.think_s if turn else 0.0,
            )
            for turn, messages in enumerate(said)
        )
        return Conversation(phase, index, tuple(turns))

    def _random(self, purpose: Purpose, *place: int) -> np.random.Generator:
        return random_of(self._scenario.seed, purpose, *place)

    def _max_tokens(self, phase: int, index: int, turn: int) -> int:
        if self._traced is not None:
            return self._traced[index].output_tokens
        assert self._work.output_tokens is not None
        random = self._random(Purpose.OUTPUT_LENGTH, phase, index, turn)
        return draw_length(self._work.output_tokens, random)

    def _temperature(self, phase: int, index: int) -> float:
        point = self._random(Purpose.TEMPERATURE, phase, index).random()
        place = int(np.searchsorted(self._temperature_ends, point, side="right"))
        return self._work.temperature[min(place, len(self._work.temperature) - 1)].temperature

    def _opening(self, script: Script, phase: int, index: int) -> list[Message]:
        """The messages before the first answer, of the length that is asked for."""
        *before, last = script.opening
        messages = [*before, Message(last.role, self._padded(script, phase, index))]
        shared = self._work.shared_prefix
        if shared is None:
            return messages
        group = int(self._random(Purpose.PREFIX_GROUP, phase, index).integers(shared.groups))
        prefix = self._prefix(group)
        if messages[0].role == "system":  # templates take one
            return [Message("system", prefix + GAP + messages[0].content), *messages[1:]]
        return [Message("system", prefix), *messages]

    def _padded(self, script: Script, phase: int, index: int) -> str:
        """The user's text behind so much padding that the opening has its length.

        A text that is too long itself is left whole, but in a trace, whose lengths count.
        """
        tokens = self._prompt_tokens(phase, index)
        if tokens is None:
            return script.text
        room = chars_of(tokens) - sum(len(message.content) for message in script.opening)
        if room < 0 and self._traced is not None:
            return cut(script.text, len(script.text) + room)
        if room <= len(GAP):
            return script.text
        return self._padding(room - len(GAP), phase, index) + GAP + script.text

    def _prompt_tokens(self, phase: int, index: int) -> int | None:
        """How long the opening is to be; None: as long as it is."""
        if self._traced is not None:
            return self._traced[index].prompt_tokens
        if self._work.prompt_tokens is None:
            return None
        random = self._random(Purpose.PROMPT_LENGTH, phase, index)
        return draw_length(self._work.prompt_tokens, random)

    def _padding(self, num_chars: int, phase: int, index: int) -> str:
        """Text that no other conversation has, but where a trace says which prompts share one."""
        blocks = () if self._traced is None else self._traced[index].prefix_blocks
        if not blocks:
            random = self._random(Purpose.PADDING, phase, index)
            return self._filler.text(f"Document {phase}-{index}.", num_chars, random)
        size = max(1, chars_of(self._block_tokens))
        texts = (
            self._filler.text(f"Part {block}.", size, self._random(Purpose.PREFIX_BLOCK, block))
            for block in blocks[: num_chars // size + 1]
        )
        return cut(GAP.join(texts), num_chars)

    def _make_prefix(self, group: int) -> str:
        assert self._work.shared_prefix is not None
        num_chars = chars_of(self._work.shared_prefix.tokens)
        random = self._random(Purpose.PREFIX, group)
        return self._filler.text(f"Handbook {group}.", num_chars, random)
