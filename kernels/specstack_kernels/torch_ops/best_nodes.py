"""Vectorised twin of `reference.best_nodes`: one depth per step, then one sort."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack_kernels.torch_ops.ranking import best_columns
from specstack_kernels.types import BestNodes


def best_nodes(
    parent_index: Int[Tensor, "B M"],
    log_q: Float[Tensor, "B M"],
    num_drafts: int,
    *,
    max_depth: int,
) -> BestNodes:
    """Return the S = min(num_drafts, M) best candidates of each request. Host sync: none.

    Args:
        parent_index: a candidate before this one, or -1 for the root; of a slot without a
            candidate any number in [-1, M).
        log_q: given the parent, <= 0; -inf: no candidate.
        max_depth: at least 1; what is deeper counts as no candidate.
    """
    paths = accumulate_log_q(parent_index, log_q, max_depth)
    order = best_columns(paths, num_drafts)
    path_log_q = paths.gather(1, order)
    rank = torch.arange(1, order.shape[1] + 1, device=order.device)
    node_of = torch.empty_like(parent_index).scatter_(1, order, rank.expand_as(order))
    parent = parent_index.gather(1, order)
    is_inner = (path_log_q > -torch.inf) & (parent >= 0)
    parent_node = torch.where(is_inner, node_of.gather(1, parent.clamp(min=0)), 0)
    return BestNodes(order, path_log_q, parent_node)


def accumulate_log_q(
    parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], max_depth: int
) -> Float[Tensor, "B M"]:
    """Return the log q of every candidate's path, -inf beyond `max_depth`.

    Added from the root down, so that rounding never lifts a child above its parent: pointer
    doubling would need fewer steps, but it groups the terms differently per node.
    """
    at_root = parent_index < 0
    parent_slot = parent_index + 1  # slot 0 stands for the root
    path_log_q = torch.where(at_root, log_q, -torch.inf)
    for _ in range(min(max_depth, log_q.shape[1]) - 1):
        parent_log_q = pad(path_log_q, (1, 0)).gather(1, parent_slot)
        path_log_q = parent_log_q + log_q
    return path_log_q
