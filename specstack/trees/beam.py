"""The beam tree of EAGLE-2 (arXiv 2406.16858, section 4): expand few nodes, verify the best.

At each depth the `width` best nodes are expanded, each into its `width` best children; of all
candidates the best by path probability are verified. Letters: B requests, M candidates.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.tries import depths
from specstack_kernels.ops import accumulate_log_q


class BeamBuilder(BestFirstBuilder):
    """Leaves out what continues a node outside the beam."""

    def _without(
        self, parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], draft_budget: int
    ) -> Float[Tensor, "B M"]:
        assert self.width is not None
        log_q = super()._without(parent_index, log_q, draft_budget)
        path_log_q = accumulate_log_q(parent_index, log_q, self.depth)
        depth = depths(parent_index, self.depth)
        in_beam = torch.zeros_like(parent_index, dtype=torch.bool)
        is_open = in_beam
        for level in range(1, min(self.depth, log_q.shape[1]) + 1):
            is_open = pad(in_beam, (1, 0), value=True).gather(1, parent_index + 1)
            at_level = path_log_q.masked_fill(~is_open | (depth != level), -torch.inf)
            best = at_level.topk(min(self.width, log_q.shape[1]), dim=1)
            is_new = torch.zeros_like(in_beam).scatter_(1, best.indices, best.values > -torch.inf)
            in_beam = in_beam | is_new
        return log_q.masked_fill(~is_open, -torch.inf)
