"""Corrects what a drafter says of its drafts by what was measured of earlier ones.

A drafter that was trained on the right paths is too sure of what follows a step that was not its
best guess. The factor of a draft depends on its depth, its rank among its siblings, and on whether
its parent lies on the spine, the path of the best guess each time. Letters: B requests,
M candidates, K depths, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.trees.tries import depths, on_spine, sibling_ranks


class Calibration:
    """Adds the logarithm of a measured factor to log q."""

    def __init__(self, log_factor: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take [K][R][2] numbers: off the spine, on it; deeper and lower drafts use the last."""
        self._log_factor = torch.tensor(log_factor, dtype=torch.float32)
        if self._log_factor.ndim != 3 or self._log_factor.shape[2] != 2:
            shape = tuple(self._log_factor.shape)
            raise ValueError(f"log_factor must be [depths][ranks][2], got {list(shape)}")

    def __call__(
        self, parent_index: Int[Tensor, "B M"], log_q: Float[Tensor, "B M"], max_depth: int
    ) -> Float[Tensor, "B M"]:
        """Return calibrated log q, at most 0. Host sync: none once it is on the device."""
        self._log_factor = table = self._log_factor.to(log_q.device)
        ranks = sibling_ranks(parent_index, log_q)
        spine = pad(on_spine(parent_index, ranks, max_depth), (1, 0), value=True)
        depth = depths(parent_index, max_depth) - 1
        row = depth.clamp(max=table.shape[0] - 1)
        column = ranks.clamp(max=table.shape[1] - 1)
        factor = table[row, column, spine.gather(1, parent_index + 1).long()]
        return (log_q + factor.to(log_q.dtype)).clamp(max=0.0)
