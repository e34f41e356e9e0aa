"""From occurrences of a context to the most probable continuations, as a trie.

Every occurrence votes for the token that followed it, with a weight that grows with the length of
its match. The estimate is PPM's, with the escape of method C (Moffat, IEEE Trans. Comm. 38(11),
1990): "something new" gets as many votes as different tokens have followed, so

    q(token | node) = votes for it / (number of different tokens + sum of all votes).

PPM backs off from one context length to the next; here all lengths vote at once and the weights
let long ones win. `weight(n)` is the odds that a lone match of n tokens continues correctly.
Below a node the matches are longer by one per accepted token, as they would be if the search were
repeated there. An occurrence that runs into the present reads on in the proposed tokens, as LZ77's
overlapping copies do: a loop in the text continues to any depth.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

from specstack.drafters.suffix_index import SEPARATOR


@dataclass
class Candidates:
    """One row of a proposal: parents first, cumulative log q never rising."""

    tokens: list[int] = field(default_factory=list)
    parent_index: list[int] = field(default_factory=list)
    log_q: list[float] = field(default_factory=list)


Vote = tuple[list[int], int, int]
"""An `Occurrence`, or one that a node has moved on, without the price of building its class."""


class _Entry(NamedTuple):
    """A continuation that waits to be taken; the smallest is the most probable."""

    cost: float
    """-log q along the path."""
    serial: int
    """Orders equals: the more recent occurrence was pushed first."""
    parent: int
    path: tuple[int, ...]
    log_q: float
    votes: list[Vote]


class Continuations:
    """Takes continuations of one context, the most probable first."""

    def __init__(self, history: list[int], weights: Sequence[float], max_depth: int) -> None:
        """Continue `history`; `weights[n]` is the weight of a match of n tokens."""
        self.candidates = Candidates()
        self._history = history
        self._weights = weights
        self._max_depth = max_depth
        self._heap: list[_Entry] = []
        self._num_pushed = 0
        self._node_of: dict[int, int] = {}  # serial -> candidate
        self._best_child: dict[int, _Entry] = {}  # candidate -> its most probable child

    def take_best(self, occurrences: Sequence[Vote], max_nodes: int) -> None:
        """Take the `max_nodes` most probable nodes of the trie, or all."""
        self._push_children(-1, (), 0.0, occurrences)
        while self._heap and len(self.candidates.tokens) < max_nodes:
            self._take(heapq.heappop(self._heap))

    def take_chain(self, max_nodes: int) -> None:
        """Take what is missing of the path that follows the most probable child each time."""
        entry = self._best_child.get(-1)
        while entry is not None and len(entry.path) <= max_nodes:
            if entry.serial not in self._node_of:
                self._take(entry)
            entry = self._best_child.get(self._node_of[entry.serial])

    def _take(self, entry: _Entry) -> None:
        row = self.candidates
        node = len(row.tokens)
        row.tokens.append(entry.path[-1])
        row.parent_index.append(entry.parent)
        row.log_q.append(entry.log_q)
        self._node_of[entry.serial] = node
        if len(entry.path) < self._max_depth:
            self._push_children(node, entry.path, entry.cost, entry.votes)

    def _push_children(
        self, node: int, path: tuple[int, ...], cost: float, votes: Sequence[Vote]
    ) -> None:
        """Group the votes by their token and push every group."""
        groups: dict[int, list[Vote]] = {}
        group_weight: dict[int, float] = {}
        total = 0.0
        longest = len(self._weights) - 1
        for tokens, position, match_len in votes:
            if position < len(tokens):
                token = tokens[position]
                if token == SEPARATOR:
                    continue
            elif tokens is self._history:
                token = path[position - len(tokens)]
            else:
                continue
            weight = self._weights[min(match_len, longest)]
            total += weight
            moved_on = (tokens, position + 1, match_len + 1)
            if token in groups:
                groups[token].append(moved_on)
                group_weight[token] += weight
            else:
                groups[token] = [moved_on]
                group_weight[token] = weight
        total += len(groups)  # the escape
        entries: list[_Entry] = []
        for token, group in groups.items():
            log_q = log(group_weight[token] / total)
            serial = self._num_pushed + len(entries)
            entries.append(_Entry(cost - log_q, serial, node, (*path, token), log_q, group))
        for entry in entries:
            heapq.heappush(self._heap, entry)
        self._num_pushed += len(entries)
        if entries:
            self._best_child[node] = min(entries)
