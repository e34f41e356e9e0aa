"""Vectorised twin of `reference.accept_greedy`."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from specstack_kernels.torch_ops.walk import walk_tree
from specstack_kernels.types import Walk


def accept_greedy(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    target_predict: Int[Tensor, "B N"],
    *,
    max_depth: int,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1. Host sync: none."""

    def predicted(step: int, node: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        return target_predict.gather(1, node[:, None])[:, 0]

    return walk_tree(draft_tokens, parent_index, num_nodes, predicted, max_depth=max_depth)
