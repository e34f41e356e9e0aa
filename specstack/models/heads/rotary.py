"""Rotary positions exactly as the target's, by transformers' own frequencies.

Letters: *T token axes, G heads, C head size. Halves of the head vector are paired (Llama's
layout). Angles and rotation are computed in float32 or better, whatever the head's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specstack.models.heads.config import TargetShape


@dataclass(frozen=True)
class Rotation:
    """The rotations of some positions, computed once for all layers."""

    cos: Float[Tensor, "*T 1 C"]
    sin: Float[Tensor, "*T 1 C"]
    scale: float
    """Factor on the length of what is rotated (YaRN's attention factor)."""

    def apply(self, x: Float[Tensor, "*T G C"]) -> Float[Tensor, "*T G C"]:
        """Rotate to the positions."""
        return (x * self.cos + _rotate_half(x) * self.sin).to(x.dtype)

    def invert(self, x: Float[Tensor, "*T G C"]) -> Float[Tensor, "*T G C"]:
        """Undo `apply`."""
        return ((x * self.cos - _rotate_half(x) * self.sin) / self.scale**2).to(x.dtype)


class Rotary(nn.Module):
    """Positions to rotations."""

    inv_freq: Tensor

    def __init__(self, target: TargetShape) -> None:
        super().__init__()
        inv_freq, self.scale = _frequencies(target)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def forward(self, positions: Int[Tensor, "*T"]) -> Rotation:
        angles = positions[..., None, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)  # [*T, 1, C]
        return Rotation(angles.cos() * self.scale, angles.sin() * self.scale, self.scale)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        # A head in bfloat16 needs float32 frequencies: at position 4,000 bfloat16 is off by turns.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self


def _frequencies(target: TargetShape) -> tuple[Tensor, float]:
    config = LlamaConfig(
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters=dict(target.rope),
    )
    kind = target.rope["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
