"""What both forms of heads are built of: the target's own kind of transformer layer.

Letters: B sequences, Q queries, K keys, L committed tokens (padded), S rows of a pool, *T token
axes, D hidden size, H query heads, G KV heads, C head size. Module names are Hugging Face's, so
that a layer starts from a target's state dict.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from specstack.models.heads.config import HeadConfig, TargetShape
from specstack.models.heads.rotary import Rotation
from specstack_kernels.ops import draft_attention


@dataclass(frozen=True)
class LayerKV:
    """Keys (rotated) and values of some tokens in one layer."""

    keys: Float[Tensor, "*T G C"]
    values: Float[Tensor, "*T G C"]

    def heads(self, start: int, end: int) -> LayerKV:
        """Some of the heads."""
        return LayerKV(self.keys[..., start:end, :], self.values[..., start:end, :])


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of committed tokens where a pool keeps them: all are seen by every query."""

    keys: Float[Tensor, "S G C"]
    """All rows of the pool in one layer."""
    values: Float[Tensor, "S G C"]
    kv_slots: Int[Tensor, "B L"]
    """Rows of each sequence; beyond its length: any."""
    seq_lens: Int[Tensor, " B"]


def join(*parts: LayerKV | None, dim: int = 1) -> LayerKV:
    """Concatenate along tokens (dim 1) or heads (dim -2); None is nothing."""
    found = [part for part in parts if part is not None]
    return LayerKV(
        torch.cat([part.keys for part in found], dim=dim),
        torch.cat([part.values for part in found], dim=dim),
    )


def attend(
    queries: Float[Tensor, "B Q H C"],
    keys: Float[Tensor, "B K G C"],
    values: Float[Tensor, "B K G C"],
    mask: Bool[Tensor, "B Q K"],
) -> Float[Tensor, "B Q H*C"]:
    """Softmax attention with grouped heads; a query that sees nothing gets zeros. Host sync: none.

    Raises:
        ValueError: the mask has other sizes than queries and keys.
    """
    expected = (queries.shape[0], queries.shape[1], keys.shape[1])
    if mask.shape != expected:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, expected {expected}")
    sees = mask.any(dim=-1, keepdim=True)  # [B, Q, 1]
    output = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=(mask | ~sees)[:, None],
        enable_gqa=True,
    )
    return output.transpose(1, 2).flatten(-2) * sees


class Attention(nn.Module):
    """Attention with the target's geometry."""

    def __init__(self, target: TargetShape) -> None:
        super().__init__()
        self.head_dim = target.head_dim
        hidden, kv_width = target.hidden_size, target.num_kv_heads * target.head_dim
        self.q_proj = nn.Linear(hidden, target.num_heads * target.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(target.num_heads * target.head_dim, hidden, bias=False)
        if target.qk_norm:
            self.q_norm: nn.Module = nn.RMSNorm(target.head_dim, eps=target.rms_norm_eps)
            self.k_norm: nn.Module = nn.RMSNorm(target.head_dim, eps=target.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def key_value(self, x: Float[Tensor, "*T D"], rotation: Rotation) -> LayerKV:
        """Keys and values of tokens, without attention."""
        keys = self.k_norm(self._split(self.k_proj(x)))
        return LayerKV(rotation.apply(keys), self._split(self.v_proj(x)))

    def forward(
        self,
        x: Float[Tensor, "B Q D"],
        rotation: Rotation,
        seen: LayerKV | PagedKV | None,
        mask: Bool[Tensor, "B Q K"],
    ) -> tuple[Float[Tensor, "B Q D"], LayerKV]:
        """Attend what was seen before, then each other; return the output and own KV.

        Args:
            mask: columns of what was seen and of each other; paged KV has none.
        """
        own = self.key_value(x, rotation)
        queries = rotation.apply(self.q_norm(self._split(self.q_proj(x))))
        if isinstance(seen, PagedKV):
            pool = seen.keys, seen.values, seen.kv_slots, seen.seq_lens
            attended = draft_attention(queries, *pool, own.keys, own.values, mask).flatten(-2)
        else:
            known = join(seen, own)
            attended = attend(queries, known.keys, known.values, mask)
        return self.o_proj(attended), own

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A pre-norm transformer layer like the target's, with context in front of its own keys."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        target = config.target
        self.input_layernorm = nn.RMSNorm(target.hidden_size, eps=target.rms_norm_eps)
        self.self_attn = Attention(target)
        self.post_attention_layernorm = nn.RMSNorm(target.hidden_size, eps=target.rms_norm_eps)
        self.mlp = Mlp(target.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Float[Tensor, "B Q D"],
        rotation: Rotation,
        context: LayerKV | PagedKV | None,
        prefix: LayerKV | None,
        mask: Bool[Tensor, "B Q K"],
        self_mask: Bool[Tensor, "B Q K"] | None,
    ) -> tuple[Float[Tensor, "B Q D"], LayerKV]:
        """Return the output and own KV.

        Args:
            context: KV derived from target features, first in the order of `mask`'s columns;
                paged KV has none there, and no prefix beside it.
            prefix: own KV of earlier inputs, next in that order; this call's inputs come last.
            self_mask: only for layers that attend twice (`sources.GatedLayer`); None here.
        """
        seen = context
        if not isinstance(seen, PagedKV) and prefix is not None:
            seen = join(seen, prefix)
        attended, own = self.self_attn(self.input_layernorm(x), rotation, seen, mask)
        return self.after_attention(x, attended), own

    def context_kv(self, fused: Float[Tensor, "*T D"], rotation: Rotation) -> LayerKV:
        """KV of tokens that enter as fused features: what this layer would keep of them."""
        return self.self_attn.key_value(self.input_layernorm(fused), rotation)

    def after_attention(
        self, x: Float[Tensor, "B Q D"], attended: Float[Tensor, "B Q D"]
    ) -> Float[Tensor, "B Q D"]:
        """Add, norm, feed forward, add."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))
