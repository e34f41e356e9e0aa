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

from specstack.drafters.choice import Choice
from specstack.drafters.expansion import Children, Frontier
from specstack.models.heads.block import BlockHead
from specstack.types import DraftLaw, DraftProposal
from specstack_kernels.ops import best_prefixes, score_frontier


class Marginals:
    """One distribution per depth, whatever the path."""

    def __init__(
        self,
        head: BlockHead,
        hidden: Float[Tensor, "B K D"],
        token_ids: Int[Tensor, " W"] | None,
        choice: Choice,
    ) -> None:
        depths = torch.arange(hidden.shape[1], device=hidden.device)
        self._all = choice.of_logits(head.logits(hidden), token_ids, depths)

    def best(self, draft_budget: int) -> DraftProposal:
        """The best paths, without expanding them. Host sync: none."""
        found = best_prefixes(self._all.tokens, self._all.log_q, draft_budget)
        return DraftProposal(found.tokens, found.parent_index, found.log_q)

    def first(self) -> Children:
        """Depth 1."""
        return self._of(0, 1)

    def next(self, frontier: Frontier) -> Children:
        """The same for every node."""
        return self._of(frontier.depth, frontier.tokens.shape[1])

    def _of(self, depth: int, num_nodes: int) -> Children:
        def same(values: Tensor) -> Tensor:
            return values[:, depth, None].expand(-1, num_nodes, -1)

        law = self._all.law
        law = law and DraftLaw(same(law.tokens), same(law.probs))
        return Children(same(self._all.tokens), same(self._all.log_q), law)


class Corrected:
    """Distributions that depend on the path, over the best candidates of each depth."""

    def __init__(
        self,
        head: BlockHead,
        hidden: Float[Tensor, "B K D"],
        bonus_tokens: Int[Tensor, " B"],
        token_ids: Int[Tensor, " W"] | None,
        choice: Choice,
        num_candidates: int,
        corrections: Float[Tensor, "W R"],
    ) -> None:
        logits = head.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best = logits.topk(min(num_candidates, logits.shape[-1]), dim=-1)
        self._base = best.values  # [B, K, C]
        self._rest = logits.scatter_(2, best.indices, -torch.inf).logsumexp(dim=2)  # [B, K]
        self._tokens = best.indices if token_ids is None else token_ids[best.indices]
        self._rows = embedding(best.indices, corrections)  # [B, K, C, R]
        self._head = head
        self._choice = choice
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
        scored = score_frontier(
            self._state,
            self._rows[:, depth],
            self._base[:, depth],
            self._rest[:, depth],
            width=min(self._choice.width, self._base.shape[2]),
        )
        tokens = self._tokens[:, depth, None].expand_as(scored.log_q)
        return self._choice.of_scored(scored, tokens, depth)


def correction_table(head: BlockHead) -> Float[Tensor, "W R"]:
    """What one unit of state adds to the logit of each token; for a head that is not trained."""
    assert head.corrector is not None
    weight = head.corrector.up.weight
    return weight if head.config.conditioning.output == "logits" else head.lm_head.weight @ weight
