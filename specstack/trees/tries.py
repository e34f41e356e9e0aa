"""What follows from a trie of candidates: ranks among siblings, depths, the spine.

Letters: B requests, M candidates.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad


def sibling_ranks(
    parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"]
) -> Int[Tensor, "B M"]:
    """Return how many siblings are more probable; ties go to the first. Host sync: none."""
    by_log_q = log_q.sort(dim=1, descending=True, stable=True).indices
    by_parent = parent_index.gather(1, by_log_q).sort(dim=1, stable=True)
    order = by_log_q.gather(1, by_parent.indices)  # families together, best first
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    starts = pad(by_parent.values[:, 1:] != by_parent.values[:, :-1], (1, 0), value=True)
    first = torch.where(starts[:, : order.shape[1]], place, 0).cummax(dim=1).values
    return torch.empty_like(order).scatter_(1, order, place - first)


def depths(parent_index: Int[Tensor, "B M"], max_depth: int) -> Int[Tensor, "B M"]:
    """Return 1 for children of the root, and so on; at most `max_depth`. Host sync: none."""
    parent_slot = parent_index + 1
    depth = torch.ones_like(parent_index)
    for _ in range(min(max_depth, parent_index.shape[1]) - 1):
        depth = 1 + pad(depth, (1, 0)).gather(1, parent_slot)
    return depth.clamp(max=max_depth)


def on_spine(
    parent_index: Int[Tensor, "B M"], ranks: Int[Tensor, "B M"], max_depth: int
) -> Bool[Tensor, "B M"]:
    """Return which candidates the most probable child each time leads to. Host sync: none."""
    is_best = ranks == 0
    spine = is_best & (parent_index < 0)
    for _ in range(min(max_depth, ranks.shape[1]) - 1):
        spine = is_best & pad(spine, (1, 0), value=True).gather(1, parent_index + 1)
    return spine
