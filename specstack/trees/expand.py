"""The expanding tree of JetFlow (arXiv 2606.18394, Algorithm 1).

Take the best node of the tree and append all its W children, until there are N nodes. Nodes are
taken in falling order of path probability, as a child is never more probable than its parent; so
who is appended when follows from one sort, without a loop. Letters: B requests, M candidates.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.tries import sibling_ranks
from specstack_kernels.ops import accumulate_log_q


class ExpandBuilder(BestFirstBuilder):
    """Leaves out what Algorithm 1 would append after the budget is spent."""

    def _without(
        self, parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], draft_budget: int
    ) -> Float[Tensor, "B M"]:
        log_q = super()._without(parent_index, log_q, draft_budget)
        num_candidates = log_q.shape[1]
        if num_candidates <= draft_budget:
            return log_q
        path_log_q = accumulate_log_q(parent_index, log_q, self.depth)
        taken = path_log_q.sort(dim=1, descending=True, stable=True).indices
        place = torch.arange(1, num_candidates + 1, device=log_q.device).expand_as(taken)
        turn = torch.empty_like(taken).scatter_(1, taken, place)  # when a node is expanded
        turn = pad(turn, (1, 0)).gather(1, parent_index + 1)  # the root first
        appended = turn * num_candidates + sibling_ranks(parent_index, log_q)
        appended = appended.masked_fill(path_log_q == -torch.inf, (1 << 62))
        late = appended.sort(dim=1, stable=True).indices[:, draft_budget:]
        return log_q.scatter(1, late, -torch.inf)
