"""Vectorised twin of `reference.sum_kv`: all tokens and layers at once."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.torch_ops.kv_rows import kept_slots, rotate, unrotate


def sum_kv(
    keys: Float[Tensor, "T n G C"],
    values: Float[Tensor, "T n G C"],
    k_down: Float[Tensor, "n R G*C"] | None,
    v_down: Float[Tensor, "n R G*C"] | None,
    k_up: Float[Tensor, "n G*C R"] | Float[Tensor, "n G*C"],
    v_up: Float[Tensor, "n G*C R"] | Float[Tensor, "n G*C"],
    cos: Float[Tensor, "T C"],
    sin: Float[Tensor, "T C"],
    kv_slots: Int[Tensor, " T"],
    is_kept: Bool[Tensor, " T"],
    pool_keys: Float[Tensor, "S n G C"],
    pool_values: Float[Tensor, "S n G C"],
    *,
    scale: float = 1.0,
) -> None:
    """Add to the rows `kv_slots` of the kept tokens; garbage in the last. Host sync: none."""
    slots = kept_slots(kv_slots, is_kept, pool_keys)
    cos, sin = cos[:, None, None], sin[:, None, None]  # [T, 1, 1, C]
    added = rotate(_mapped(unrotate(keys, cos, sin, scale), k_down, k_up), cos, sin)
    pool_keys[slots] = pool_keys[slots] + added
    pool_values[slots] = pool_values[slots] + _mapped(values, v_down, v_up)


def _mapped(
    x: Float[Tensor, "T n G C"],
    down: Float[Tensor, "n R G*C"] | None,
    up: Float[Tensor, "n G*C R"] | Float[Tensor, "n G*C"],
) -> Float[Tensor, "T n G C"]:
    if down is None:
        return x * up.view(x.shape[1:])
    layers = x.flatten(2).transpose(0, 1)  # [n, T, G C]
    mapped = torch.bmm(torch.bmm(layers, down.mT), up.mT)
    return mapped.transpose(0, 1).view(x.shape)
