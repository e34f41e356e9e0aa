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
    target, source = path_slots(window, accept_index)
    for pool in pools:
        rows = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool  # float8 has no gather
        rows.index_copy_(0, target, rows.index_select(0, source))


def path_slots(
    window: Int[Tensor, "B N"], accept_index: Int[Tensor, "B K"]
) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
    """Slots to write and slots to read that bring the accepted paths to the window's front.

    Padding reads and writes the same slot. Host sync: none.
    """
    target = window[:, : accept_index.shape[1]]
    source = window.gather(1, accept_index.clamp(min=0))
    source = torch.where(accept_index >= 0, source, target)
    return target.reshape(-1), source.reshape(-1)
