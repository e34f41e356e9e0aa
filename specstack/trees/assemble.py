"""From chosen nodes to a DraftTree: padding, the root, and what follows from the parents.

Letters: B requests, S chosen drafts, N = draft_budget + 1 nodes.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.types import DraftLaw, DraftTree
from specstack_kernels.ops import link_tree


def assemble_tree(
    tokens: Int[Tensor, "B S"],
    parent_index: Int[Tensor, "B S"],
    log_q: Float[Tensor, "B S"],
    bonus_tokens: Int[Tensor, " B"],
    *,
    num_draft_tokens: int,
    max_depth: int,
    min_survival: float = 0.0,
    sources: Int[Tensor, "B S"] | None = None,
    law: DraftLaw | None = None,
    offered_log_q: Float[Tensor, "B S"] | None = None,
) -> DraftTree:
    """Put the root in front, pad to N and link. Host sync: none.

    Args:
        parent_index: in nodes of the tree to build (0 is the root, draft s is node s + 1).
        log_q: cumulative along the path; -inf marks dead drafts, which stand last.
        min_survival: less likely paths are dead, too; what continues them is less likely still.
        sources: as `DraftProposal.sources`, of the chosen drafts.
        law: of the root and the chosen drafts, [B, S + 1, C].
        offered_log_q: handed on.
    """
    price = math.log(min_survival) if min_survival > 0 else -math.inf
    is_live = (log_q > -torch.inf) & (log_q >= price)
    padding = (1, num_draft_tokens - 1 - tokens.shape[1])
    node_tokens = pad(torch.where(is_live, tokens, 0), padding)
    node_tokens[:, 0] = bonus_tokens
    parents = pad(torch.where(is_live, parent_index, 0), padding)
    parents[:, 0] = -1
    node_log_q = pad(log_q.masked_fill(~is_live, -torch.inf), padding, value=-torch.inf)
    node_log_q[:, 0] = 0.0
    num_nodes = is_live.sum(dim=1) + 1
    linked = link_tree(parents, num_nodes, max_depth=max_depth)
    return DraftTree(
        tokens=node_tokens,
        parent_index=parents,
        depth=linked.depth,
        tree_mask=linked.tree_mask,
        retrieve_next_token=linked.retrieve_next_token,
        retrieve_next_sibling=linked.retrieve_next_sibling,
        log_q=node_log_q,
        num_nodes=num_nodes,
        sources=None if sources is None else pad(torch.where(is_live, sources, 0), padding),
        law=None if law is None else law.padded(num_draft_tokens),
        offered_log_q=offered_log_q,
    )
