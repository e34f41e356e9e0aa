"""Keys and values that draft layers keep of verified tokens: the definition.

A token enters as fused target features x (DFlash, arXiv 2602.06036) and passes a layer's input
norm, projections, k-norm and RoPE, but no attention:

    h = RMSNorm(x, norm_weight)     key_g = RoPE(RMSNorm((k_weight h)_g, k_norm_weight))
                                    value_g = (v_weight h)_g

Deviation: fused features pass the layer's own input norm, as the target's hidden states would.
Letters: T tokens, n draft layers, D hidden size, G KV heads, C head size, S rows of the pool.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def context_kv(
    fused: Float[Tensor, "T D"],
    norm_weight: Float[Tensor, "n D"],
    k_weight: Float[Tensor, "n G*C D"],
    v_weight: Float[Tensor, "n G*C D"],
    k_norm_weight: Float[Tensor, "n C"] | None,
    cos: Float[Tensor, "T C"],
    sin: Float[Tensor, "T C"],
    kv_slots: Int[Tensor, " T"],
    is_kept: Bool[Tensor, " T"],
    pool_keys: Float[Tensor, "S n G C"],
    pool_values: Float[Tensor, "S n G C"],
    *,
    eps: float,
) -> None:
    """Write the rows `kv_slots` of the kept tokens; computed exactly, rounded once.

    Args:
        fused, kv_slots: anything where not kept.
        k_norm_weight: None for targets without k-norm.
        cos, sin: of the tokens' positions, times the attention factor.
        kv_slots: distinct; never the pool's last row, which takes garbage in other versions.
    """
    _, layers, heads, head_dim = pool_keys.shape
    for t in range(len(fused)):
        if not bool(is_kept[t]):
            continue
        for n in range(layers):
            hidden = rms_norm(fused[t].double(), norm_weight[n], eps)
            keys = (k_weight[n].double() @ hidden).view(heads, head_dim)
            values = (v_weight[n].double() @ hidden).view(heads, head_dim)
            for g in range(heads):
                key = keys[g]
                if k_norm_weight is not None:
                    key = rms_norm(key, k_norm_weight[n], eps)
                pool_keys[kv_slots[t], n, g] = rotate(key, cos[t], sin[t]).to(pool_keys.dtype)
                pool_values[kv_slots[t], n, g] = values[g].to(pool_values.dtype)


def rms_norm(
    x: Float[Tensor, " D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, " D"]:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x / torch.sqrt((x**2).mean() + eps) * weight


def rotate(
    x: Float[Tensor, " C"], cos: Float[Tensor, " C"], sin: Float[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """Element i of the first half is paired with element i of the second (Llama's layout)."""
    first, second = x.chunk(2)
    return x * cos + torch.cat([-second, first]) * sin


def unrotate(
    x: Float[Tensor, " C"], cos: Float[Tensor, " C"], sin: Float[Tensor, " C"], scale: float
) -> Float[Tensor, " C"]:
    """Undo `rotate`, whose cos and sin are `scale` times those of an angle."""
    return rotate(x, cos, -sin) / scale**2
