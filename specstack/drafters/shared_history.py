"""The histories of finished requests, in bounded memory.

Two generations of half the capacity each: when the young one is full the old one is dropped whole,
so nothing is ever removed from an index.
"""

from __future__ import annotations

from collections.abc import Sequence

from specstack.drafters.suffix_index import SEPARATOR, Occurrence, SuffixIndex


class SharedHistory:
    """A searchable store of at most `max_tokens` (2 or more) tokens."""

    def __init__(self, max_tokens: int, min_match: int, max_match: int) -> None:
        self._generation_tokens = max(1, max_tokens // 2)
        self._min_match = min_match
        self._max_match = max_match
        self.clear()

    @property
    def num_tokens(self) -> int:
        """Tokens held, separators included."""
        return len(self._young.tokens) + len(self._old.tokens)

    def clear(self) -> None:
        """Drop everything."""
        self._young, self._old = self._new_generation(), self._new_generation()

    def add(self, tokens: Sequence[int]) -> None:
        """Store a finished history: of one that exceeds a generation, its end."""
        num_dropped = max(0, len(tokens) + 1 - self._generation_tokens)
        kept = [*tokens[num_dropped:], SEPARATOR]
        if len(self._young.tokens) + len(kept) > self._generation_tokens:
            self._old, self._young = self._young, self._new_generation()
        self._young.extend(kept)

    def find(self, context: Sequence[int], limit: int) -> list[Occurrence]:
        """Return up to `limit` occurrences of the end of `context`, young ones first."""
        found: list[Occurrence] = []
        for generation in (self._young, self._old):
            missing = limit - len(found)
            if missing:
                found += generation.find(context, missing)
        return found

    def _new_generation(self) -> SuffixIndex:
        return SuffixIndex(self._min_match, self._max_match)
