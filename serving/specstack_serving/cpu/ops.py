"""RMSNorm and rotary embedding in few torch calls.

SGLang's portable versions issue 8 and 30 small operations; at batch sizes of a CPU the calls cost
more than the arithmetic. Registered as SGLang's per-platform forwards (`register`); a case
outside the common one goes to the portable version.

Letters: T tokens, H heads, D head size, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    for rope in rope_classes():
        sgl.BaseFusedOp.register_oot_forward(rope, forward_rope, DISPATCH_KEY)


def rope_classes() -> tuple[type, ...]:
    """The rotary embeddings that differ in their table alone."""
    return (sgl.RotaryEmbedding, sgl.Llama3RotaryEmbedding)


def is_plain_norm(norm: Any) -> bool:
    """Whether an `RMSNorm` is float32 over the whole row."""
    return (
        norm.weight.dtype == torch.float32
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
    )


def forward_rms_norm(
    self: Any,
    x: Float[Tensor, "... D"],
    residual: Float[Tensor, "... D"] | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """`RMSNorm.forward_native`: the norm of x, or that of x + residual together with the sum."""
    if x.dtype != torch.float32 or not is_plain_norm(self) or post_residual_addition is not None:
        return self.forward_native(x, residual, post_residual_addition)
    if residual is None:
        return rms_norm(x, (self.hidden_size,), self.weight, self.variance_epsilon)
    total = x + residual
    return rms_norm(total, (self.hidden_size,), self.weight, self.variance_epsilon), total


def is_plain_rope(rope: Any) -> bool:
    """Whether a `RotaryEmbedding` turns whole float32 heads in half-split layout."""
    return (
        rope.is_neox_style
        and rope.rotary_dim == rope.head_size
        and rope.cos_sin_cache.dtype == torch.float32
    )


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
        is_plain_rope(self)
        and query.dtype == key.dtype == torch.float32
        and query.dim() == key.dim() == 2
        and offsets is None
    )
    if not plain:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    turn = rotation(self, positions)
    width = query.shape[1]
    if is_next_to(query, key):
        # Both are slices of one projection: rotate them in one go.
        both = query.as_strided((query.shape[0], width + key.shape[1]), query.stride())
        rotated = turn(both)
        return rotated[:, :width], rotated[:, width:]
    return turn(query), turn(key)


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of T positions, for any number of heads side by side."""

    cos: Float[Tensor, "T 1 D"]
    sin: Float[Tensor, "T 1 D"]

    def __call__(self, x: Float[Tensor, "T HD"]) -> Float[Tensor, "T HD"]:
        """x * cos + swap_halves(x) * sin, head by head."""
        size = self.cos.shape[-1]
        heads = x.unflatten(1, (-1, size))
        swapped = heads.roll(size // 2, dims=-1)
        return swapped.mul_(self.sin).addcmul_(heads, self.cos).flatten(1)


def rotation(rope: Any, positions: Int[Tensor, "*T"]) -> Rotation:
    """Look the factors of `positions` up."""
    rows = rotation_table(rope).index_select(0, positions.flatten())[:, None]
    return Rotation(*rows.chunk(2, dim=-1))


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


def is_next_to(left: Float[Tensor, "T A"], right: Float[Tensor, "T B"]) -> bool:
    """Whether `right`'s rows start where `left`'s end, in one storage."""
    return (
        left.stride() == right.stride()
        and left.stride(1) == 1
        and left.data_ptr() + left.shape[1] * left.element_size() == right.data_ptr()
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    )
