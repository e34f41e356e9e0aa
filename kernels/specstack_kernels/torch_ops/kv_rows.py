"""What the ops that fill a KV pool share: where rows go, and RoPE.

Letters: T tokens, G KV heads, C head size, S rows of the pool, *L any axes.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def kept_slots(
    kv_slots: Int[Tensor, " T"], is_kept: Bool[Tensor, " T"], pool: Float[Tensor, "S ..."]
) -> Int[Tensor, " T"]:
    """Where each token is written: its slot, or the pool's last row, which nobody reads."""
    return kv_slots.masked_fill(~is_kept, pool.shape[0] - 1)


def rotate(
    x: Float[Tensor, "T *L C"], cos: Float[Tensor, "T *1 C"], sin: Float[Tensor, "T *1 C"]
) -> Float[Tensor, "T *L C"]:
    """Rotate in the precision of cos and sin, at least."""
    return (x * cos + _turned(x) * sin).to(x.dtype)


def unrotate(
    x: Float[Tensor, "T *L C"],
    cos: Float[Tensor, "T *1 C"],
    sin: Float[Tensor, "T *1 C"],
    scale: float,
) -> Float[Tensor, "T *L C"]:
    """Undo `rotate`, whose cos and sin are `scale` times those of an angle."""
    return ((x * cos - _turned(x) * sin) / scale**2).to(x.dtype)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
