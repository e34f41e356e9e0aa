"""Vectorised twin of `reference.score_frontier`: one batched product, one sort."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.types import ScoredFrontier

TIE_BREAK = 2.0**-40
"""Far below the distance of two float32 numbers (2^-24), far above float64's rounding (2^-53)."""


def score_frontier(
    state: Float[Tensor, "B F R"],
    rows: Float[Tensor, "B C R"],
    base: Float[Tensor, "B C"],
    rest: Float[Tensor, " B"],
    *,
    width: int,
) -> ScoredFrontier:
    """Return log q of all candidates and each node's best `width`. Host sync: none."""
    dtype = torch.promote_types(state.dtype, torch.float32)
    corrected = base[:, None].to(dtype) + state.to(dtype) @ rows.to(dtype).mT  # [B, F, C]
    inside = corrected.logsumexp(dim=2, keepdim=True)
    log_q = corrected - torch.logaddexp(inside, rest[:, None, None].to(dtype))
    # Distinct keys, so that a sort need not be stable: equal log q rise with the index.
    index = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device)
    best_index = _sort_ascending(log_q * (-1 - TIE_BREAK * index))[..., :width]
    return ScoredFrontier(log_q, best_index, log_q.gather(2, best_index))


def _sort_ascending(keys: Float[Tensor, "B F C"]) -> Int[Tensor, "B F C"]:
    """Indices that sort rows. On the CPU numpy's vectorised sort takes a third of topk's time."""
    if keys.device.type == "cpu":
        return torch.from_numpy(keys.numpy().argsort(axis=-1))
    return keys.argsort(dim=-1)
