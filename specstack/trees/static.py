"""The static tree: the same shape in every round, given as paths of ranks (Medusa, Sequoia).

Letters: B requests, M candidates, S nodes of the shape, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.trees.ranked import RankedBuilder
from specstack.trees.tries import sibling_ranks


class StaticBuilder(RankedBuilder):
    """Takes the first nodes of the shape, as many as the budget."""

    has_fixed_shape = True

    def __init__(
        self,
        paths: Sequence[Sequence[int]],
        calibration: Mapping[str, Any] | None = None,
        cost: Sequence[tuple[int, float]] | None = None,
    ) -> None:
        """As `RankedBuilder`.

        Args:
            paths: [0, 2] is the third best child of the best child of the root; parents and better
                siblings first.
        """
        super().__init__(max(map(len, paths), default=0), calibration, cost)
        node_of = {(): 0, **{tuple(path): i for i, path in enumerate(paths, start=1)}}
        self._next = torch.full((len(paths) + 2, 1 + max(map(max, paths))), len(paths) + 1)
        """[S + 2, R]: node 0 is the root, node S + 1 is outside the shape."""
        for node, path in enumerate(map(tuple, paths), start=1):
            parent = node_of.get(path[:-1], node)
            better = node_of.get((*path[:-1], path[-1] - 1), node) if path[-1] else parent
            if parent >= node or better >= node or node_of[path] != node:
                raise ValueError(
                    "paths must be distinct and name parents and better siblings first, got"
                    f" {list(paths)}"
                )
            self._next[parent, path[-1]] = node

    def _without(
        self, parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], draft_budget: int
    ) -> Float[Tensor, "B M"]:
        self._next = table = self._next.to(log_q.device)
        outside = table.shape[0] - 1
        ranks = sibling_ranks(parent_index, log_q)
        column = ranks.clamp(max=table.shape[1] - 1)
        node = torch.full_like(parent_index, outside)
        for _ in range(min(self.depth, node.shape[1])):
            node = table[pad(node, (1, 0)).gather(1, parent_index + 1), column]
            node = node.masked_fill(ranks >= table.shape[1], outside)
        is_in = node <= min(draft_budget, outside - 1)
        return log_q.masked_fill(~is_in, -torch.inf)
