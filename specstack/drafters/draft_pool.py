"""A head's keys and values, one row per KV slot of the target: what is shared there is shared here.

Letters: S KV slots, T tokens, B requests, L columns, G heads, C head size.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack.models.heads.layers import LayerKV


class DraftPool:
    """Keys and values of all draft layers."""

    def __init__(
        self,
        num_layers: int,
        num_kv_slots: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        size = (num_kv_slots + 1, num_heads, head_dim)
        self.layers = [
            LayerKV(
                torch.zeros(size, device=device, dtype=dtype),
                torch.zeros(size, device=device, dtype=dtype),
            )
            for _ in range(num_layers)
        ]
        """[S + 1 G C] each; the last row takes what is not kept."""
        self._nowhere = num_kv_slots

    def write(
        self, kv_slots: Int[Tensor, "*T"], layers: list[LayerKV], is_kept: Bool[Tensor, "*T"]
    ) -> None:
        """Keep [*T G C] per layer where `is_kept`. Host sync: none."""
        kv_slots = kv_slots.masked_fill(~is_kept, self._nowhere)
        for kept, new in zip(self.layers, layers, strict=True):
            kept.keys[kv_slots] = new.keys
            kept.values[kv_slots] = new.values

    def read(self, kv_slots: Int[Tensor, "B L"], is_live: Bool[Tensor, "B L"]) -> list[LayerKV]:
        """Return [B L G C] per layer, zeros where not live: a mask does not stop a NaN.

        Host sync: none.
        """
        dead = ~is_live[..., None, None]
        return [
            LayerKV(
                kept.keys[kv_slots].masked_fill(dead, 0), kept.values[kv_slots].masked_fill(dead, 0)
            )
            for kept in self.layers
        ]


def live_columns(lengths: Int[Tensor, " B"], num_columns: int) -> Bool[Tensor, "B L"]:
    """Which columns lie before each length."""
    return torch.arange(num_columns, device=lengths.device) < lengths[:, None]
