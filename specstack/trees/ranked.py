"""What all builders share: price the candidates, leave some out, take the best of the rest.

A builder says which candidates it leaves out (`_without`); everything else is the same: calibrated
scores, the nodes in falling order of path probability, and where to stop. Candidates that were
drawn at random stay in the order of the draws, and only their number decides how many are verified:
a rule that divides p by q needs the tree to be chosen without looking at them (non-anticipation).
Letters: B requests, M candidates, N = draft_budget + 1 nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.trees.assemble import assemble_tree
from specstack.trees.calibration import Calibration
from specstack.trees.cost import RoundCost
from specstack.types import DraftProposal, DraftTree
from specstack_kernels.ops import accumulate_log_q, best_nodes


class RankedBuilder:
    """Takes the nodes with the most probable paths among those that `_without` leaves."""

    has_fixed_shape: ClassVar[bool] = False
    """What is drawn at random decides nothing: rules that divide p by q may follow."""

    def __init__(
        self,
        depth: int,
        calibration: Mapping[str, Any] | None = None,
        cost: Sequence[tuple[int, float]] | None = None,
    ) -> None:
        """Build trees of at most `depth` drafts in a path.

        Args:
            calibration: of `Calibration`; None: log q as proposed.
            cost: of `RoundCost`; None: the budget alone decides.
        """
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.depth = depth
        self._calibration = None if calibration is None else Calibration(**calibration)
        self._cost = None if cost is None else RoundCost(cost)

    def build(
        self,
        proposal: DraftProposal,
        bonus_tokens: Int[Tensor, " B"],
        draft_budget: int,
        min_survival: float = 0.0,
        max_drafts: Int[Tensor, " B"] | None = None,
    ) -> DraftTree:
        """Return trees of N nodes, live ones by falling cumulative log q. Host sync: none."""
        if proposal.law is not None:
            assert self.has_fixed_shape, "drawn drafts need a tree of fixed shape"
            is_priced = min_survival > 0 or self._cost is not None
            assert not is_priced, "drawn drafts are all verified"
            return self._drawn(proposal, bonus_tokens, draft_budget, max_drafts)
        parents, log_q = proposal.parent_index, proposal.log_q
        if self.has_fixed_shape:  # by the drafter's own ranks, as it expanded them
            log_q = self._without(parents, log_q, draft_budget)
        if self._calibration is not None:
            log_q = self._calibration(parents, log_q, self.depth)
        if not self.has_fixed_shape:
            log_q = self._without(parents, log_q, draft_budget)
        best = best_nodes(parents, log_q, draft_budget, max_depth=self.depth)
        path_log_q = best.path_log_q
        if self._cost is not None:
            path_log_q = self._cost.cut(path_log_q)
        path_log_q = _first(path_log_q, max_drafts)
        return assemble_tree(
            proposal.tokens.gather(1, best.order),
            best.parent_node,
            path_log_q,
            bonus_tokens,
            num_draft_tokens=draft_budget + 1,
            max_depth=self.depth,
            min_survival=min_survival,
            sources=None if proposal.sources is None else proposal.sources.gather(1, best.order),
            offered_log_q=best.path_log_q,
        )

    def _without(
        self, parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], draft_budget: int
    ) -> Float[Tensor, "B M"]:
        """Return log q with -inf at what the tree may not hold. Host sync: none."""
        return log_q

    def _drawn(
        self,
        proposal: DraftProposal,
        bonus_tokens: Int[Tensor, " B"],
        draft_budget: int,
        max_drafts: Int[Tensor, " B"] | None,
    ) -> DraftTree:
        """Take the first drafts that were drawn; where a law ran out of tokens there are none."""
        assert proposal.law is not None
        path_log_q = accumulate_log_q(proposal.parent_index, proposal.log_q, self.depth)
        is_dead = path_log_q[:, :draft_budget] == -torch.inf
        order = is_dead.to(torch.uint8).sort(dim=1, stable=True).indices
        place = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
        node_of = torch.empty_like(order).scatter_(1, order, place)
        parent = proposal.parent_index.gather(1, order)
        offered = path_log_q.gather(1, order)
        return assemble_tree(
            proposal.tokens.gather(1, order),
            torch.where(parent < 0, 0, node_of.gather(1, parent.clamp(min=0))),
            _first(offered, max_drafts),
            bonus_tokens,
            num_draft_tokens=draft_budget + 1,
            max_depth=self.depth,
            law=proposal.law.gather(pad(order + 1, (1, 0))),
            offered_log_q=offered,
        )


def _first(
    path_log_q: Float[Tensor, "B S"], max_drafts: Int[Tensor, " B"] | None
) -> Float[Tensor, "B S"]:
    """Return -inf from each request's own budget on. Host sync: none."""
    if max_drafts is None:
        return path_log_q
    place = torch.arange(path_log_q.shape[1], device=path_log_q.device)
    return path_log_q.masked_fill(place >= max_drafts[:, None], -torch.inf)
