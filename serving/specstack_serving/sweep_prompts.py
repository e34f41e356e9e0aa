"""Texts to hold a server busy with: English of varied words, so that drafters have work to do."""

from __future__ import annotations

import random

_SUBJECTS = (
    "The old harbour master", "A young engineer from the north", "Our neighbour's daughter",
    "The committee on public gardens", "An unusually patient librarian", "The night train's cook",
    "A team of four surveyors", "The retired judge", "Every student in the workshop",
    "The keeper of the lighthouse",
)  # fmt: skip
_VERBS = (
    "measured", "repaired", "described", "forgot about", "carefully painted", "sold",
    "wrote a long letter about", "compared", "argued for an hour over", "photographed",
)  # fmt: skip
_OBJECTS = (
    "the wooden bridge behind the mill", "seven boxes of green apples", "the map of the coast",
    "a steam engine that nobody understood", "the first draft of the contract",
    "two violins with missing strings", "the results of the election", "a collection of clocks",
    "the shortest route across the hills", "the price of copper in winter",
)  # fmt: skip
_ENDINGS = (
    "before the rain began.", "because the deadline was close.", "and then went home in silence.",
    "while the others were still asleep.", "although the weather report had warned against it.",
    "for reasons that became clear only in spring.", "with the help of a borrowed ladder.",
    "until somebody finally asked why.",
)  # fmt: skip
_TOKENS_PER_WORD = 1.25
"""Of English, for vocabularies of some ten thousand tokens."""


def sweep_prompt(number: int, num_tokens: int) -> str:
    """A text of about `num_tokens` tokens, to be continued; another one for every `number`."""
    chosen = random.Random(number)
    words: list[str] = ["Report", str(number), "of", "the", "local", "paper."]
    while len(words) < num_tokens / _TOKENS_PER_WORD:
        parts = (chosen.choice(choices) for choices in (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS))
        words += " ".join(parts).split()
    return " ".join(words)
