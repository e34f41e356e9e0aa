"""Vectorised twin of `reference.move_kv`: one gather and one scatter per pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def move_kv(
    pools: Sequence[Tensor], window: Int[Tensor, "B N"], accept_index: Int[Tensor, "B K"]
) -> None:
    """Move rows of every pool in place. Host sync: none.

    Args:
        pools: [S ..], one row per slot: keys or values of a layer.
        window: slots; no slot stands twice.
        accept_index: node ids, rising; -1 moves nothing.
    """
    target = window[:, : accept_index.shape[1]]
    source = window.gather(1, accept_index.clamp(min=0))
    # Padding reads and writes the same slot.
    source = torch.where(accept_index >= 0, source, target).flatten()
    target = target.flatten()
    for pool in pools:
        rows = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool  # float8 has no gather
        rows.index_copy_(0, target, rows.index_select(0, source))
