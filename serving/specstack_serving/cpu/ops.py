"""RMSNorm and rotary embedding in few torch calls.

SGLang's portable versions issue 8 and 30 small operations; at batch sizes of a CPU the calls cost
more than the arithmetic. Registered as SGLang's per-platform forwards (`register`); a case
outside the common one goes to the portable version.

Letters: T tokens, H heads, D head size, P positions.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import rms_norm

from specstack_serving import sglang_compat as sgl

DISPATCH_KEY = "specstack_cpu"


def register() -> None:
    """Make SGLang dispatch these operators here on a platform with `DISPATCH_KEY`."""
    sgl.BaseFusedOp.register_oot_forward(sgl.RMSNorm, forward_rms_norm, DISPATCH_KEY)
    for rope in (sgl.RotaryEmbedding, sgl.Llama3RotaryEmbedding):
        sgl.BaseFusedOp.register_oot_forward(rope, forward_rope, DISPATCH_KEY)


def forward_rms_norm(
    self: Any,
    x: Float[Tensor, "... D"],
    residual: Float[Tensor, "... D"] | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """`RMSNorm.forward_native`: the norm of x, or that of x + residual together with the sum."""
    plain = (
        x.dtype == torch.float32
        and self.weight.dtype == torch.float32
        and self.variance_size_override is None
        and self.override_orig_dtype is None
        and post_residual_addition is None
    )
    if not plain:
        return self.forward_native(x, residual, post_residual_addition)
    if residual is None:
        return rms_norm(x, (self.hidden_size,), self.weight, self.variance_epsilon)
    total = x + residual
    return rms_norm(total, (self.hidden_size,), self.weight, self.variance_epsilon), total


def forward_rope(
    self: Any,
    positions: Int[Tensor, " T"],
    query: Float[Tensor, "T QD"],
    key: Float[Tensor, "T KD"],
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """`RotaryEmbedding.forward_native` for whole heads in half-split layout."""
    plain = (
        self.is_neox_style
        and self.rotary_dim == self.head_size
        and query.dtype == key.dtype == self.cos_sin_cache.dtype == torch.float32
        and query.dim() == key.dim() == 2
        and offsets is None
    )
    if not plain:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = rotation_table(self).index_select(0, positions.flatten())[:, None].chunk(2, dim=-1)
    width = query.shape[1]
    if is_next_to(query, key):
        # Both are slices of one projection: rotate them in one go.
        both = query.as_strided((query.shape[0], width + key.shape[1]), query.stride())
        rotated = rotate(both, cos, sin)
        return rotated[:, :width], rotated[:, width:]
    return rotate(query, cos, sin), rotate(key, cos, sin)


def rotation_table(rope: Any) -> Float[Tensor, "P 2*D"]:
    """Per position, the factors of a head and of its swapped halves: [cos cos | -sin sin]."""
    source, table = getattr(rope, "_specstack_rotation", (None, None))
    if source is not rope.cos_sin_cache:
        source = rope.cos_sin_cache  # replaced when it grows
        cos, sin = source.chunk(2, dim=-1)
        table = torch.cat([cos, cos, -sin, sin], dim=-1)
        rope._specstack_rotation = (source, table)
    assert table is not None
    return table


def rotate(
    x: Float[Tensor, "T HD"], cos: Float[Tensor, "T 1 D"], sin: Float[Tensor, "T 1 D"]
) -> Float[Tensor, "T HD"]:
    """x * cos + swap_halves(x) * sin, head by head."""
    size = cos.shape[-1]
    heads = x.unflatten(1, (-1, size))
    return heads.roll(size // 2, dims=-1).mul_(sin).addcmul_(heads, cos).flatten(1)


def is_next_to(left: Float[Tensor, "T A"], right: Float[Tensor, "T B"]) -> bool:
    """Whether `right`'s rows start where `left`'s end, in one storage."""
    return (
        left.stride() == right.stride()
        and left.stride(1) == 1
        and left.data_ptr() + left.shape[1] * left.element_size() == right.data_ptr()
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    )
