"""The best-first tree: the nodes with the largest path probabilities.

DDTree (arXiv 2604.12989, Prop. 1): for a factorised draft law the tree of N nodes that maximises
the expected number of accepted tokens is the top-N prefixes by probability. A prefix is never
less probable than its extensions, so one sort of the candidates gives it and no heap is needed.
Letters: B requests, M candidates, N = draft_budget + 1 nodes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.trees.assemble import assemble_tree
from specstack.types import DraftProposal, DraftTree


class BestFirstBuilder:
    """Keeps the best drafts of each request, by cumulative log q, parents before children."""

    def __init__(self, depth: int, width: int | None = None) -> None:
        """Limit trees to `depth` drafts in a path and `width` children of a node (None: any)."""
        if depth < 1 or (width is not None and width < 1):
            raise ValueError(f"depth and width must be at least 1, got {depth} and {width}")
        self.depth = depth
        self.width = width

    def build(
        self,
        proposal: DraftProposal,
        bonus_tokens: Int[Tensor, " B"],
        draft_budget: int,
        min_survival: float = 0.0,
    ) -> DraftTree:
        """Return trees of N nodes, live ones by falling cumulative log q. Host sync: none."""
        log_q = proposal.log_q
        if self.width is not None:
            log_q = _limit_width(proposal.parent_index, log_q, self.width)
        path_log_q = accumulate_log_q(proposal.parent_index, log_q, self.depth)
        # Stable: among equals the parent, which stands first in the row, stays first.
        ranked, order = path_log_q.sort(dim=1, descending=True, stable=True)
        order = order[:, :draft_budget]
        node_of = torch.empty_like(proposal.parent_index)  # candidate -> node of the tree
        rank = torch.arange(1, order.shape[1] + 1, device=order.device)
        node_of.scatter_(1, order, rank.expand_as(order))
        parent = proposal.parent_index.gather(1, order)  # as a candidate, -1 = root
        parent_node = torch.where(parent < 0, 0, node_of.gather(1, parent.clamp(min=0)))
        return assemble_tree(
            proposal.tokens.gather(1, order),
            parent_node,
            ranked[:, :draft_budget],
            bonus_tokens,
            num_draft_tokens=draft_budget + 1,
            max_depth=self.depth,
            min_survival=min_survival,
            sources=None if proposal.sources is None else proposal.sources.gather(1, order),
        )


def accumulate_log_q(
    parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], depth: int
) -> Float[Tensor, "B M"]:
    """Return the log q of every candidate's path, -inf beyond `depth`.

    Added from the root down, so that rounding never lifts a child above its parent: pointer
    doubling would need fewer steps, but it groups the terms differently per node.
    """
    at_root = parent_index < 0
    parent_slot = parent_index + 1  # slot 0 stands for the root
    path_log_q = torch.where(at_root, log_q, -torch.inf)
    for _ in range(min(depth, log_q.shape[1]) - 1):
        parent_log_q = pad(path_log_q, (1, 0)).gather(1, parent_slot)
        path_log_q = parent_log_q + log_q
    return path_log_q


def _limit_width(
    parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], width: int
) -> Float[Tensor, "B M"]:
    """Drop all but the `width` most probable children of every node; ties go to the first."""
    mine, other = log_q[:, :, None], log_q[:, None, :]
    index = torch.arange(log_q.shape[1], device=log_q.device)
    is_better = (other > mine) | ((other == mine) & (index < index[:, None]))
    is_sibling = parent_index[:, :, None] == parent_index[:, None, :]
    rank = (is_better & is_sibling).sum(dim=2)  # [B, M]
    return log_q.masked_fill(rank >= width, -torch.inf)
