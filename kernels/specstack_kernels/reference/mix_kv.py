"""The target's keys and values, mixed for draft layers: the definition.

KVShot (arXiv 2604.26412): a draft layer's KV is a learned linear map of m tapped layers' KV,
heads and layers mixed, and its keys are rotated (again) to the token's position:

    key = RoPE(k_mix [key_1; ..; key_m])        value = v_mix [value_1; ..; value_m]

Ours, `is_derotated`: tapped keys, which the target has rotated, are rotated back first, so that
the mix keeps relative positions. Letters: T tokens, n draft layers, m tapped layers, G KV heads,
C head size, S rows of the pool.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.reference.context_kv import rotate, unrotate


def mix_kv(
    keys: Float[Tensor, "T m G C"],
    values: Float[Tensor, "T m G C"],
    k_mix: Float[Tensor, "n G*C m*G*C"],
    v_mix: Float[Tensor, "n G*C m*G*C"],
    cos: Float[Tensor, "T C"],
    sin: Float[Tensor, "T C"],
    kv_slots: Int[Tensor, " T"],
    is_kept: Bool[Tensor, " T"],
    pool_keys: Float[Tensor, "S n G C"],
    pool_values: Float[Tensor, "S n G C"],
    *,
    is_derotated: bool,
    scale: float = 1.0,
) -> None:
    """Write the rows `kv_slots` of the kept tokens; computed exactly, rounded once.

    Args:
        keys: rotated, as the target's pool holds them.
        cos, sin, kv_slots, is_kept: as `context_kv`.
        scale: attention factor that cos and sin contain.
    """
    _, layers, heads, head_dim = pool_keys.shape
    taps = keys.shape[1]
    for t in range(len(keys)):
        if not bool(is_kept[t]):
            continue
        tapped = keys[t].double().clone()  # [m, G, C]
        if is_derotated:
            for tap in range(taps):
                for g in range(heads):
                    tapped[tap, g] = unrotate(tapped[tap, g], cos[t], sin[t], scale)
        for n in range(layers):
            key = (k_mix[n].double() @ tapped.flatten()).view(heads, head_dim)
            value = (v_mix[n].double() @ values[t].double().flatten()).view(heads, head_dim)
            rotated = torch.stack([rotate(key[g], cos[t], sin[t]) for g in range(heads)])
            pool_keys[kv_slots[t], n] = rotated.to(pool_keys.dtype)
            pool_values[kv_slots[t], n] = value.to(pool_values.dtype)
