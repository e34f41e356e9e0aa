"""Vectorised twin of `reference.mix_kv`: keys are rotated back once, for all draft layers."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear

from specstack_kernels.torch_ops.kv_rows import kept_slots, rotate, unrotate


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
    """Write the rows `kv_slots` of the kept tokens, and garbage to the last. Host sync: none."""
    slots = kept_slots(kv_slots, is_kept, pool_keys)
    heads = pool_keys.shape[2:]
    if is_derotated:
        keys = unrotate(keys, cos[:, None, None], sin[:, None, None], scale)
    keys, values = keys.flatten(1), values.flatten(1)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, C]
    for layer in range(pool_keys.shape[1]):
        mixed = linear(keys, k_mix[layer]).unflatten(1, heads)  # [T, G, C]
        pool_keys[:, layer].index_copy_(0, slots, rotate(mixed, cos, sin))
        mixed = linear(values, v_mix[layer]).unflatten(1, heads)
        pool_values[:, layer].index_copy_(0, slots, mixed)
