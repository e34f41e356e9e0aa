"""Vectorised twin of `reference.context_kv`: layer by layer, all tokens at once."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from specstack_kernels.torch_ops.kv_rows import kept_slots, rotate


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
    """Write the rows `kv_slots` of the kept tokens, and garbage to the last. Host sync: none."""
    slots = kept_slots(kv_slots, is_kept, pool_keys)
    heads = pool_keys.shape[2:]
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, C]
    for layer in range(pool_keys.shape[1]):
        hidden = rms_norm(fused, norm_weight.shape[1:], norm_weight[layer], eps)
        keys = linear(hidden, k_weight[layer]).unflatten(1, heads)  # [T, G, C]
        if k_norm_weight is not None:
            keys = rms_norm(keys, heads[1:], k_norm_weight[layer], eps)
        values = linear(hidden, v_weight[layer]).unflatten(1, heads)
        pool_keys[:, layer].index_copy_(0, slots, rotate(keys, cos, sin))
        pool_values[:, layer].index_copy_(0, slots, values)
