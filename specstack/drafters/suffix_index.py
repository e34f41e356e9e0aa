"""Where a context has occurred before in a growing list of tokens.

Hash chains as in LZ77 compressors (RFC 1951, section 4), at doubling lengths: for n = min_match,
2 min_match, 4 min_match, ... every position links to the previous position that ends the same n
tokens. A search walks the chain of the longest n first, so it meets the best matches within a
bounded number of steps, and an append costs one link per length. A suffix automaton would also
append in O(1) and know every match length, but only token by token: a prompt of 8K tokens takes it
tens of milliseconds in Python, while chains are built by sorting, in a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
"""A token that no vocabulary has: no match reaches across it."""

_MASK = (1 << 64) - 1
_POSITION_BITS = 24
_BULK_TOKENS = 64  # from here on sorting a chunk is cheaper than linking token by token


class Occurrence(NamedTuple):
    """An earlier place where the last tokens are the same."""

    tokens: list[int]
    """The history it stands in."""
    position: int
    """Of the token that followed."""
    match_len: int
    """Tokens that agree, up to max_match."""


class SuffixIndex:
    """A history of tokens and the chains of its n-grams."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.tokens: list[int] = []
        self._max_match = max_match
        self._lengths = [min_match]
        while 4 * self._lengths[-1] <= max_match:
            self._lengths.append(2 * self._lengths[-1])
        self._heads: list[dict[int, int]] = [{} for _ in self._lengths]
        self._previous: list[list[int]] = [[] for _ in self._lengths]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        if len(tokens) >= _BULK_TOKENS:
            self._extend_bulk(tokens)
            return
        for token in tokens:
            position = len(self.tokens)
            self.tokens.append(token)
            keys = self._keys(self.tokens)
            for level, previous in enumerate(self._previous):
                if level < len(keys):
                    heads, key = self._heads[level], keys[level]
                    previous.append(heads.get(key, -1))
                    heads[key] = position
                else:
                    previous.append(-1)

    def find_end(self, limit: int) -> list[Occurrence]:
        """Return up to `limit` earlier occurrences of the end of this history.

        Long matches come first (told apart in doubling steps), recent ones first among them.
        """
        if not self.tokens:
            return []
        starts = [previous[-1] for previous in self._previous]
        return self._follow(starts, self.tokens[-self._max_match :], limit)

    def find(self, context: Sequence[int], limit: int) -> list[Occurrence]:
        """Return up to `limit` occurrences of the end of another history, ordered alike.

        Args:
            context: its last max_match tokens or more.
        """
        pairs = zip(self._heads, self._keys(context), strict=False)
        return self._follow([heads.get(key, -1) for heads, key in pairs], context, limit)

    def _follow(
        self, starts: Sequence[int], context: Sequence[int], limit: int
    ) -> list[Occurrence]:
        """Walk the chains that begin at `starts`, one per level, the longest n-gram first."""
        found: list[Occurrence] = []
        seen: set[int] = set()
        for level in reversed(range(len(starts))):
            at_least = self._lengths[level]
            previous = self._previous[level]
            position = starts[level]
            for _ in range(2 * limit):
                if position < 0 or len(found) == limit:
                    break
                if position not in seen:
                    match_len = self._match_len(position, context)
                    if match_len >= at_least:  # else two n-grams share a key
                        seen.add(position)
                        found.append(Occurrence(self.tokens, position + 1, match_len))
                position = previous[position]
        return found

    def _match_len(self, position: int, context: Sequence[int]) -> int:
        """Return how many tokens up to `position` equal the end of `context`."""
        tokens = self.tokens
        longest = min(self._max_match, position + 1, len(context))
        for back in range(longest):
            if tokens[position - back] != context[-1 - back]:
                return back
        return longest

    def _keys(self, context: Sequence[int]) -> list[int]:
        """Return the keys of the n-grams that end `context`, for every n that fits."""
        keys: list[int] = []
        block = self._lengths[0]
        num_blocks = min(len(context) // block, self._lengths[-1] // block)
        hashes = []
        for i in range(num_blocks):  # from the last block backwards
            end = len(context) - i * block
            value = 0
            for token in context[end - block : end]:
                value = _mix(value, token)
            hashes.append(value)
        while hashes:
            keys.append(hashes[0] >> _POSITION_BITS)
            pairs = range(0, len(hashes) - 1, 2)
            hashes = [_mix(hashes[i + 1], hashes[i]) for i in pairs]
        return keys

    def _extend_bulk(self, tokens: Sequence[int]) -> None:
        """Append many tokens: equal keys become neighbours by sorting (key, position)."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        assert len(self.tokens) < 1 << _POSITION_BITS
        offset = max(0, start - self._lengths[-1] + 1)  # first position that the n-grams need
        recent = np.asarray(self.tokens[offset:], dtype=np.int64).astype(np.uint64)
        block = self._lengths[0]
        hashes = np.zeros(max(0, len(recent) - block + 1), dtype=np.uint64)
        for i in range(block):
            hashes = _mix(hashes, recent[i : i + len(hashes)])
        for level, length in enumerate(self._lengths):
            # hashes[i] belongs to the n-gram that ends at offset + length - 1 + i
            first = max(start, offset + length - 1)
            self._previous[level].extend([-1] * (min(first, len(self.tokens)) - start))
            self._link(level, hashes[first - offset - length + 1 :], first)
            hashes = _mix(hashes[:-length], hashes[length:])

    def _link(self, level: int, hashes: NDArray[np.uint64], first: int) -> None:
        """Link the positions first, first + 1, ... whose n-grams have these hashes."""
        if len(hashes) == 0:
            return
        positions = np.arange(first, first + len(hashes), dtype=np.uint64)
        low_bits = np.uint64((1 << _POSITION_BITS) - 1)
        packed = np.sort((hashes & ~low_bits) | positions)
        keys = packed >> np.uint64(_POSITION_BITS)
        ends = (packed & low_bits).astype(np.int64)
        is_new = np.empty(len(keys), dtype=bool)
        is_new[0] = True
        np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
        is_last = np.append(is_new[1:], True)
        unique = keys[is_new].tolist()
        heads = self._heads[level]
        previous = np.empty(len(hashes), dtype=np.int64)
        previous[ends[1:] - first] = ends[:-1]
        if heads:
            previous[ends[is_new] - first] = [heads.get(key, -1) for key in unique]
        else:
            previous[ends[is_new] - first] = -1
        self._previous[level].extend(previous.tolist())
        heads.update(zip(unique, ends[is_last].tolist(), strict=True))


def _mix(left: Any, right: Any) -> Any:
    """Hash a pair modulo 2^64: Python integers and uint64 arrays give the same numbers."""
    mixed = (left * 0x9E3779B97F4A7C15 + right * 0xC2B2AE3D27D4EB4F + 1) & _MASK
    return mixed ^ (mixed >> 29)
