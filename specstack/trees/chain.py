"""The chain: the most probable candidate after each other, from the root.

Letters: B requests, M candidates.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.trees.ranked import RankedBuilder
from specstack.trees.tries import on_spine, sibling_ranks


class ChainBuilder(RankedBuilder):
    """Leaves out all but the most probable child of each node: node i continues node i - 1."""

    has_fixed_shape = True

    def _without(
        self, parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], draft_budget: int
    ) -> Float[Tensor, "B M"]:
        spine = on_spine(parent_index, sibling_ranks(parent_index, log_q), self.depth)
        return log_q.masked_fill(~spine, -torch.inf)
