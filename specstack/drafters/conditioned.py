"""Children of a block's nodes: marginals per depth, or corrected by the path (DSpark, Domino).

A corrector would cost one lm_head per node. Its correction is linear in a state of R numbers, so
for the best tokens of a depth without correction it is one small table per depth, shared by all
nodes. Deviation: the tokens outside keep their uncorrected weight, as one lump that is proposed
by nobody; the probabilities of a node still add up to one. Letters: B requests, K depths,
F frontier nodes, C candidates of a depth, W draft vocabulary, D hidden size, R rank.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from specstack.drafters.expansion import Children, Frontier, top_children
from specstack.models.heads.block import BlockHead


class Marginals:
    """One distribution per depth, whatever the path."""

    def __init__(
        self,
        head: BlockHead,
        hidden: Float[Tensor, "B K D"],
        token_ids: Int[Tensor, " W"] | None,
        width: int,
    ) -> None:
        self._all = top_children(head.logits(hidden).log_softmax(dim=-1), token_ids, width)

    def first(self) -> Children:
        """Depth 1."""
        return self._of(0, 1)

    def next(self, frontier: Frontier) -> Children:
        """The same for every node."""
        return self._of(frontier.depth, frontier.tokens.shape[1])

    def _of(self, depth: int, num_nodes: int) -> Children:
        tokens, log_q = self._all.tokens[:, depth, None], self._all.log_q[:, depth, None]
        return Children(tokens.expand(-1, num_nodes, -1), log_q.expand(-1, num_nodes, -1))


class Corrected:
    """Distributions that depend on the path, over the best candidates of each depth."""

    def __init__(
        self,
        head: BlockHead,
        hidden: Float[Tensor, "B K D"],
        bonus_tokens: Int[Tensor, " B"],
        token_ids: Int[Tensor, " W"] | None,
        width: int,
        num_candidates: int,
        corrections: Float[Tensor, "W R"],
    ) -> None:
        logits = head.logits(hidden)
        best = logits.topk(min(num_candidates, logits.shape[-1]), dim=-1)
        self._base = best.values  # [B, K, C]
        self._rest = logits.scatter_(2, best.indices, -torch.inf).logsumexp(dim=2)  # [B, K]
        self._tokens = best.indices if token_ids is None else token_ids[best.indices]
        self._rows = embedding(best.indices, corrections)  # [B, K, C, R]
        self._head = head
        self._width = width
        self._state = head.advance(bonus_tokens[:, None])  # [B, F, R]

    def first(self) -> Children:
        """Depth 1: the path is the anchor."""
        return self._children(0)

    def next(self, frontier: Frontier) -> Children:
        """Walk the corrector one token on."""
        rank = self._state.shape[-1]
        before = self._state.gather(1, frontier.parents[..., None].expand(-1, -1, rank))
        self._state = self._head.advance(frontier.tokens, before)
        return self._children(frontier.depth)

    def _children(self, depth: int) -> Children:
        corrected = self._base[:, depth, None] + self._state @ self._rows[:, depth].mT  # [B, F, C]
        inside = corrected.logsumexp(dim=2, keepdim=True)
        log_q = corrected - torch.logaddexp(inside, self._rest[:, depth, None, None])
        best = top_children(log_q, None, self._width)
        tokens = self._tokens[:, depth, None].expand_as(log_q).gather(2, best.tokens)
        return Children(tokens, best.log_q)


def correction_table(head: BlockHead) -> Float[Tensor, "W R"]:
    """What one unit of state adds to the logit of each token; for a head that is not trained."""
    assert head.corrector is not None
    weight = head.corrector.up.weight
    return weight if head.config.conditioning.output == "logits" else head.lm_head.weight @ weight
