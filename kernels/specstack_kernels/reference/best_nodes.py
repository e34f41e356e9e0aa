"""The best candidates of a trie by the probability of their paths: the definition.

DDTree (arXiv 2604.12989, Prop. 1): the most probable paths are the tree that maximises the expected
number of accepted drafts, as a path is never less probable than its extensions; of equals the lower
candidate comes first, so that a parent stands before its children. Sums are float32 from the root
down: rounding is monotone, so no child exceeds its parent. Letters: B requests, M candidates,
S chosen drafts.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.types import BestNodes


def best_nodes(
    parent_index: Int[Tensor, "B M"],
    log_q: Float[Tensor, "B M"],
    num_drafts: int,
    *,
    max_depth: int,
) -> BestNodes:
    """Return the S = min(num_drafts, M) best candidates of each request.

    Args:
        parent_index: a candidate before this one, or -1 for the root; of a slot without a
            candidate any number in [-1, M).
        log_q: given the parent, <= 0; -inf: no candidate.
        max_depth: at least 1; what is deeper counts as no candidate.
    """
    batch, num_candidates = log_q.shape
    num_kept = min(num_drafts, num_candidates)
    path_log_q = torch.full_like(log_q, -torch.inf)
    order = torch.zeros((batch, num_kept), dtype=torch.int64)
    parent_node = torch.zeros_like(order)
    for b in range(batch):
        depth: list[int] = []
        for m in range(num_candidates):
            parent = int(parent_index[b, m])
            is_candidate = log_q[b, m] > -torch.inf
            depth.append(1 + (depth[parent] if is_candidate and parent >= 0 else 0))
            if is_candidate and depth[m] <= max_depth:
                above = path_log_q[b, parent] if parent >= 0 else 0.0
                path_log_q[b, m] = above + log_q[b, m]
        ranked = sorted(range(num_candidates), key=lambda m: -float(path_log_q[b, m]))  # stable
        for s, m in enumerate(ranked[:num_kept]):
            order[b, s] = m
            parent = int(parent_index[b, m])
            if parent >= 0 and path_log_q[b, m] > -torch.inf:
                parent_node[b, s] = 1 + ranked.index(parent)
    return BestNodes(order, path_log_q.gather(1, order), parent_node)
