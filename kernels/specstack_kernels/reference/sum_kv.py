"""Maps of the target's keys and values, added to what draft layers keep: the definition.

Ours, for layers that have both (the hybrid source of KVShot, arXiv 2604.26412, for block heads).
Layer i adds its map of the i-th tapped layer's KV; keys are mapped in their unrotated frame, which
keeps relative positions:

    key += RoPE(A_i unRoPE(key_i))      value += B_i value_i

A and B are diagonal, or of low rank: up @ down. Letters: T tokens, n draft layers and tapped
layers, G KV heads, C head size, R rank, S rows of the pool.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.reference.context_kv import rotate, unrotate


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
    """Add to the rows `kv_slots` of the kept tokens; computed exactly, rounded once.

    Args:
        keys: rotated, as the target's pool holds them.
        k_down, v_down: None where the maps are diagonal; `k_up` and `v_up` hold the diagonals.
        cos, sin, kv_slots, is_kept: as `context_kv`, which wrote the rows before.
        scale: attention factor that cos and sin contain.
    """
    _, layers, heads, head_dim = pool_keys.shape
    for t in range(len(keys)):
        if not bool(is_kept[t]):
            continue
        slot = kv_slots[t]
        for n in range(layers):
            unrotated = [unrotate(keys[t, n, g].double(), cos[t], sin[t], scale) for g in
                         range(heads)]  # fmt: skip
            key = _mapped(torch.cat(unrotated), None if k_down is None else k_down[n], k_up[n])
            value = _mapped(
                values[t, n].double().flatten(), None if v_down is None else v_down[n], v_up[n]
            )
            for g in range(heads):
                head = slice(g * head_dim, (g + 1) * head_dim)
                sum_of_keys = pool_keys[slot, n, g] + rotate(key[head], cos[t], sin[t])
                sum_of_values = pool_values[slot, n, g] + value[head]
                pool_keys[slot, n, g] = sum_of_keys.to(pool_keys.dtype)
                pool_values[slot, n, g] = sum_of_values.to(pool_values.dtype)


def _mapped(
    x: Float[Tensor, " G*C"],
    down: Float[Tensor, "R G*C"] | None,
    up: Float[Tensor, "G*C R"] | Float[Tensor, " G*C"],
) -> Float[Tensor, " G*C"]:
    if down is None:
        return up.double() * x
    return up.double() @ (down.double() @ x)
