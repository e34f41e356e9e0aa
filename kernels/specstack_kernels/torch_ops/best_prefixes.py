"""Vectorised twin of `reference.best_prefixes`: the best nodes of each depth, then one sort of all.

Before the child of rank j of a depth's i-th best node (both from 0) stand the children of nodes up
to i with ranks up to j, and the i + 1 parents. So it is one of the S best only if
(i + 1) * (j + 2) <= S: about S ln S pairs of node and rank hold what S * W would.
Letters: B requests, K depths, W candidates of a depth, S chosen drafts, F nodes of a depth,
P pairs, C nodes of all depths.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.reference.best_prefixes import count_prefixes
from specstack_kernels.torch_ops.ranking import best_columns
from specstack_kernels.types import Prefixes


def best_prefixes(
    tokens: Int[Tensor, "B K W"], log_q: Float[Tensor, "B K W"], num_drafts: int
) -> Prefixes:
    """Return the S = min(num_drafts, number of prefixes) best of each request. Host sync: none.

    Args:
        log_q: <= 0 and best first in each depth; -inf: no candidate.
    """
    num_kept = count_prefixes(log_q.shape[1], log_q.shape[2], num_drafts)
    if num_kept == 0:
        none = tokens.new_zeros((len(tokens), 0))
        return Prefixes(none, none, log_q.new_zeros(none.shape), log_q.new_zeros(none.shape))
    paths, candidates, parents = _best_of_depths(log_q, num_kept)
    chosen = best_columns(paths, num_kept)
    path_log_q = paths.gather(1, chosen)
    is_live = path_log_q > -torch.inf
    rank = torch.arange(num_kept, device=chosen.device)
    rank_of = torch.empty_like(candidates).scatter_(1, chosen, rank.expand_as(chosen))
    parent = parents.gather(1, chosen)
    is_inner = is_live & (parent >= 0)
    candidate = candidates.gather(1, chosen)
    return Prefixes(
        tokens.flatten(1).gather(1, candidate).masked_fill(~is_live, 0),
        torch.where(is_inner, rank_of.gather(1, parent.clamp(min=0)), -1),
        log_q.flatten(1).gather(1, candidate).masked_fill(~is_live, -torch.inf),
        path_log_q,
    )


def _best_of_depths(
    log_q: Float[Tensor, "B K W"], num_kept: int
) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"], Int[Tensor, "B C"]]:
    """The best nodes of every depth in turn, each depth's in their order.

    Returns:
        cumulative log q; candidate as depth * W + rank; parent as a column, -1 is the root.
    """
    batch, num_depths, width = log_q.shape
    above = log_q[:, 0, :num_kept]  # [B, F]
    candidate = torch.arange(above.shape[1], device=log_q.device).expand(batch, -1)
    paths, candidates, parents = [above], [candidate], [torch.full_like(candidate, -1)]
    first = num_pairs_of = 0
    for depth in range(1, min(num_depths, num_kept)):
        if num_pairs_of != above.shape[1]:  # it soon stays at S
            num_pairs_of = above.shape[1]
            parent, rank = _pairs(num_pairs_of, width, num_kept, log_q.device)
        pairs = above.index_select(1, parent) + log_q[:, depth].index_select(1, rank)  # [B, P]
        chosen = best_columns(pairs, num_kept)
        above = pairs.gather(1, chosen)
        paths.append(above)
        candidates.append((rank + depth * width).take(chosen))
        parents.append((parent + first).take(chosen))
        first += num_pairs_of
    return torch.cat(paths, 1), torch.cat(candidates, 1), torch.cat(parents, 1)


def _pairs(
    num_parents: int, width: int, num_kept: int, device: torch.device
) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """Parents and ranks of all children that may be kept, by parent, then by rank."""
    num_pairs = sum(min(width, num_kept // i - 1) for i in range(1, num_parents + 1))
    parents = torch.arange(num_parents, device=device)
    num_children = (num_kept // (parents + 1) - 1).clamp(max=width)
    parent = parents.repeat_interleave(num_children, output_size=num_pairs)
    first = num_children.cumsum(0) - num_children
    return parent, torch.arange(num_pairs, device=device) - first[parent]
