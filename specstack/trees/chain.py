"""The chain: the most probable candidate after each other, from the root.

Letters: B requests, M candidates, N = draft_budget + 1 nodes.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from specstack.trees.assemble import assemble_tree
from specstack.types import DraftProposal, DraftTree


class ChainBuilder:
    """Follows the most probable child of each node, up to `depth` drafts."""

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.depth = depth

    def build(
        self,
        proposal: DraftProposal,
        bonus_tokens: Int[Tensor, " B"],
        draft_budget: int,
        min_survival: float = 0.0,
    ) -> DraftTree:
        """Return chains in trees of N nodes: node i continues node i - 1. Host sync: none."""
        batch, num_candidates = proposal.tokens.shape
        length = min(self.depth, draft_budget, num_candidates)
        node = torch.full((batch, 1), -1, dtype=torch.int64, device=bonus_tokens.device)
        path_log_q = torch.zeros((batch, 1), dtype=proposal.log_q.dtype, device=node.device)
        nodes, log_qs = [], []
        for _ in range(length):
            is_child = proposal.parent_index == node
            best = proposal.log_q.masked_fill(~is_child, -torch.inf).max(dim=1, keepdim=True)
            path_log_q = path_log_q + best.values
            node = best.indices
            nodes.append(node)
            log_qs.append(path_log_q)
        chain = torch.cat([node[:, :0], *nodes], dim=1)  # [B, length]
        return assemble_tree(
            proposal.tokens.gather(1, chain),
            torch.arange(length, device=node.device).expand(batch, length),
            torch.cat([path_log_q[:, :0], *log_qs], dim=1),
            bonus_tokens,
            num_draft_tokens=draft_budget + 1,
            max_depth=self.depth,
            min_survival=min_survival,
            sources=None if proposal.sources is None else proposal.sources.gather(1, chain),
        )
