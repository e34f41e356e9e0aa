"""Random rows of a KV pool, for tests and benchmarks of the ops that write them.

Letters: T tokens, n layers, G KV heads, C head size, S rows of the pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SCALE = 1.2
"""An attention factor, as YaRN's."""


class RandomRows(NamedTuple):
    """Where tokens are written, in the order in which the ops take it."""

    cos: Float[Tensor, "T C"]
    sin: Float[Tensor, "T C"]
    kv_slots: Int[Tensor, " T"]
    is_kept: Bool[Tensor, " T"]
    pool_keys: Float[Tensor, "S n G C"]
    pool_values: Float[Tensor, "S n G C"]

    def copy(self) -> RandomRows:
        """The same with a pool of its own, of the same strides."""
        return self.to(self.cos.device)

    def to(self, device: torch.device) -> RandomRows:
        """A copy elsewhere."""
        layers = torch.stack([self.pool_keys, self.pool_values], dim=2).to(device)
        cos, sin, kv_slots, is_kept = (x.to(device) for x in self[:4])
        return RandomRows(cos, sin, kv_slots, is_kept, layers[:, :, 0], layers[:, :, 1])

    def pool(self) -> Float[Tensor, "2 S-1 n G C"]:
        """What others read: all but the last row."""
        return torch.stack([self.pool_keys, self.pool_values])[:, :-1]


def random_rows(
    num_tokens: int,
    layers: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kept: float = 0.7,
) -> RandomRows:
    """Distinct slots in a pool twice as large as needed; what is not kept has NaN and no slot.

    Args:
        kept: share of the tokens; the first is kept, unless this is 0.
    """
    angles = 100 * torch.rand(num_tokens, head_dim // 2)
    angles = torch.cat([angles, angles], dim=1)
    is_kept = torch.rand(num_tokens) < kept
    is_kept[:1] = kept > 0
    num_slots = 2 * num_tokens + 3
    kv_slots = torch.randperm(num_slots)[:num_tokens].masked_fill(~is_kept, 1 << 40)
    pool = torch.randn(num_slots + 1, layers, 2, heads, head_dim).to(dtype)
    cos, sin = poisoned(angles.cos() * SCALE, is_kept), poisoned(angles.sin() * SCALE, is_kept)
    return RandomRows(cos, sin, kv_slots, is_kept, pool[:, :, 0], pool[:, :, 1])


def poisoned(x: Float[Tensor, "T ..."], is_kept: Bool[Tensor, " T"]) -> Float[Tensor, "T ..."]:
    """NaN where not kept."""
    return x.masked_fill(~is_kept.view(-1, *[1] * (x.ndim - 1)), torch.nan)
