"""The best-first tree: the nodes with the largest path probabilities.

DDTree (arXiv 2604.12989, Prop. 1): for a factorised draft law the tree of N nodes that maximises
the expected number of accepted tokens is the top-N prefixes by probability. A prefix is never
less probable than its extensions, so one sort of the candidates gives it and no heap is needed.
Letters: B requests, M candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.trees.ranked import RankedBuilder
from specstack.trees.tries import sibling_ranks


class BestFirstBuilder(RankedBuilder):
    """Leaves out what has `width` more probable siblings, and nothing else."""

    def __init__(
        self,
        depth: int,
        width: int | None = None,
        calibration: Mapping[str, Any] | None = None,
        cost: Sequence[tuple[int, float]] | None = None,
    ) -> None:
        """As `RankedBuilder`; `width` children of a node at most (None: any number)."""
        super().__init__(depth, calibration, cost)
        if width is not None and width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.width = width

    def _without(
        self, parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], draft_budget: int
    ) -> Float[Tensor, "B M"]:
        if self.width is None:
            return log_q
        return log_q.masked_fill(sibling_ranks(parent_index, log_q) >= self.width, -torch.inf)
