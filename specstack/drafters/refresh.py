"""Path conditioning without a corrector: a second pass of the head over the first tree (ours).

The first tree, drawn from the marginals, enters with its real tokens under its own mask; beside
every node stands a MASK slot as its child, which sees the path to the node and nothing else. Its
distribution replaces the marginal one for the children of that node: those in the tree get a new
log q, and the best others join them. Letters: B requests, N nodes of the first tree, root
included, W draft vocabulary, M candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.drafters.expansion import Children
from specstack.models.heads.block import BlockHead
from specstack.models.heads.layers import LayerKV, PagedKV
from specstack.models.heads.masks import tree_mask
from specstack.trees.best_first import BestFirstBuilder
from specstack.types import DraftBatch, DraftProposal, DraftTree
from specstack_kernels.ops import accumulate_log_q


class Refresh:
    """Scores a tree's children again."""

    def __init__(
        self,
        head: BlockHead,
        token_ids: Int[Tensor, " W"] | None,
        max_depth: int,
        num_context_columns: int,
    ) -> None:
        self._head, self._token_ids, self._max_depth = head, token_ids, max_depth
        self._num_context_columns = num_context_columns

    def __call__(
        self,
        proposal: DraftProposal,
        batch: DraftBatch,
        context: Sequence[LayerKV | PagedKV],
        draft_budget: int,
        width: int,
    ) -> DraftProposal:
        """Return the first tree and as many new leaves, with refreshed log q. Host sync: none."""
        tree = BestFirstBuilder(self._max_depth).build(proposal, batch.bonus_tokens, draft_budget)
        log_q = self._children(tree, batch, context)  # [B, N, W]
        known, is_known = _rescored(tree, log_q, self._draft_ids(tree.tokens[:, 1:]))
        parents = tree.parent_index[:, 1:] - 1  # candidate 0 is node 1
        paths = pad(accumulate_log_q(parents, known, self._max_depth), (1, 0))  # [B, N]
        is_end = (tree.depth >= self._max_depth) | (tree.log_q == -torch.inf)
        fresh = log_q.masked_fill(is_known | is_end[..., None], -torch.inf)
        children = self._best(fresh, width)
        scores = (paths[..., None] + children.log_q).flatten(1)
        chosen = scores.topk(min(draft_budget, scores.shape[1]), dim=1).indices
        return DraftProposal(
            torch.cat([tree.tokens[:, 1:], children.tokens.flatten(1).gather(1, chosen)], 1),
            torch.cat([parents, chosen // children.tokens.shape[2] - 1], 1),
            torch.cat([known, children.log_q.flatten(1).gather(1, chosen)], 1),
        )

    def _children(
        self, tree: DraftTree, batch: DraftBatch, context: Sequence[LayerKV | PagedKV]
    ) -> Float[Tensor, "B N W"]:
        """Log q of every token as a child of every node."""
        place = batch.seq_lens[:, None] + tree.depth
        own = torch.eye(tree.num_draft_tokens, dtype=torch.bool, device=place.device)
        own = own.expand_as(tree.tree_mask)
        ancestors = torch.cat(
            [
                torch.cat([tree.tree_mask, torch.zeros_like(own)], dim=2),
                torch.cat([tree.tree_mask, own], dim=2),
            ],
            dim=1,
        )
        masks = torch.full_like(tree.tokens, self._head.config.mask_token_id)
        hidden = self._head(
            torch.cat([tree.tokens, masks], dim=1),
            torch.cat([place, place + 1], dim=1),
            context,
            tree_mask(ancestors, batch.seq_lens, self._num_context_columns),
        )
        return self._head.logits(hidden[:, tree.num_draft_tokens :]).float().log_softmax(dim=-1)

    def _best(self, log_q: Float[Tensor, "B N W"], width: int) -> Children:
        best = log_q.topk(min(width, log_q.shape[2]), dim=-1)
        tokens = best.indices if self._token_ids is None else self._token_ids[best.indices]
        return Children(tokens, best.values)

    def _draft_ids(self, tokens: Int[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """Draft ids are the target ids in order."""
        if self._token_ids is None:
            return tokens
        return torch.searchsorted(self._token_ids, tokens.contiguous())


def _rescored(
    tree: DraftTree, log_q: Float[Tensor, "B N W"], draft_ids: Int[Tensor, "B M"]
) -> tuple[Float[Tensor, "B M"], Bool[Tensor, "B N W"]]:
    """Log q of the tree's drafts given their parents, and which children they are."""
    parents = tree.parent_index[:, 1:]
    rows = torch.arange(len(parents), device=parents.device)[:, None]
    is_dead = tree.log_q[:, 1:] == -torch.inf
    known = log_q[rows, parents, draft_ids].masked_fill(is_dead, -torch.inf)
    is_known = pad(torch.zeros_like(log_q, dtype=torch.bool), (0, 0, 0, 1))  # + a row for the dead
    is_known[rows, parents.masked_fill(is_dead, tree.num_draft_tokens), draft_ids] = True
    return known, is_known[:, :-1]
