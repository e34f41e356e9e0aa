"""Where a tree stops paying: expected tokens per second as a function of its size (CaDDTree).

With the nodes in falling order of survival the n-th adds its survival to the expected accept
length; theta(n) = (1 + Phi(n)) / T(n) rises and then falls where T is convex. Letters: B requests,
S drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


class RoundCost:
    """The time of a round by the number of its drafts per request."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """Take (drafts, milliseconds) with rising drafts from 0 on; straight lines between them."""
        drafts = [point[0] for point in points]
        times = [point[1] for point in points]
        rises = all(np.diff(drafts) > 0) and all(np.diff(times) >= 0)
        if len(points) < 2 or drafts[0] != 0 or times[0] <= 0 or not rises:
            raise ValueError(
                "cost must be at least two points (drafts, milliseconds), drafts rising from 0 on,"
                f" times positive and not falling; got {list(points)}"
            )
        self._drafts, self._times = drafts, times
        self._slope = (times[-1] - times[-2]) / (drafts[-1] - drafts[-2])
        self._table = torch.zeros(0)

    def cut(self, path_log_q: Float[Tensor, "B S"]) -> Float[Tensor, "B S"]:
        """Return -inf from the draft on behind which theta is largest. Host sync: none."""
        num_drafts = path_log_q.shape[1]
        self._table = self._up_to(num_drafts).to(path_log_q.device)
        expected = pad(1 + path_log_q.exp().cumsum(dim=1), (1, 0), value=1.0)
        theta = expected / self._table[: num_drafts + 1]
        best = theta.max(dim=1, keepdim=True).indices  # the first of equals: the smaller tree
        place = torch.arange(num_drafts, device=path_log_q.device)
        return path_log_q.masked_fill(place >= best, -torch.inf)

    def _up_to(self, num_drafts: int) -> Tensor:
        """Times of 0, 1, .., num_drafts; the last slope goes on."""
        if len(self._table) > num_drafts:
            return self._table
        wanted = np.arange(num_drafts + 1)
        times = np.interp(wanted, self._drafts, self._times)
        times += np.maximum(wanted - self._drafts[-1], 0) * self._slope
        return torch.tensor(times, dtype=torch.float32)
