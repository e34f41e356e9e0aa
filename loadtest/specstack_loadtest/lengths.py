"""Lengths in tokens: drawing them, and cutting text to them. No tokenizer is asked."""

from __future__ import annotations

import math

import numpy as np

from specstack_loadtest.scenario import Length

CHARS_PER_TOKEN = 4
"""About what the vocabularies of today give English text; code has fewer."""


def draw_length(law: Length, random: np.random.Generator) -> int:
    """Draw a length. Keeping it within min and max moves the mean where they cut often."""
    value = law.mean
    if law.cv:
        variance = math.log1p(law.cv**2)
        value *= math.exp(random.normal(-variance / 2, math.sqrt(variance)))
    return max(law.min, round(value if law.max is None else min(value, law.max)))


def chars_of(num_tokens: float) -> int:
    """Characters of a text of so many tokens, about."""
    return round(CHARS_PER_TOKEN * num_tokens)


def cut(text: str, num_chars: int) -> str:
    """The beginning of a text, at most so long, without a word that would be cut; never empty."""
    if len(text) <= num_chars:
        return text
    head = text[: max(num_chars, 1)]
    words = head.rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else head
