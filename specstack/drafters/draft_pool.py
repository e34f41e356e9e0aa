"""A head's keys and values, one row per KV slot of the target: what is shared there is shared here.

Letters: S KV slots, T tokens, B requests, L columns, n layers, G heads, C head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from specstack.models.heads.layers import LayerKV, PagedKV


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
        size = (num_kv_slots + 1, num_layers, 2, num_heads, head_dim)
        self._rows = torch.zeros(size, device=device, dtype=dtype)
        """One row per slot, so that reading is one gather; the last takes what is not kept."""
        self.layers = self._split(self._rows)
        """Views, [S + 1 G C] each."""
        self.keys, self.values = self._rows[:, :, 0], self._rows[:, :, 1]
        """Views, [S + 1 n G C] each."""
        self._nowhere = num_kv_slots
        self.is_paged = device.type == "cuda"
        """Kernels read the rows where they are; on a CPU gathering them once is faster."""

    def context(
        self, kv_slots: Int[Tensor, "B L"], seq_lens: Int[Tensor, " B"]
    ) -> Sequence[LayerKV | PagedKV]:
        """What each layer keeps of the committed tokens. Host sync: none."""
        if self.is_paged:
            return [PagedKV(kv.keys, kv.values, kv_slots, seq_lens) for kv in self.layers]
        return self.read(kv_slots, live_columns(seq_lens, kv_slots.shape[1]))

    def num_mask_columns(self, kv_slots: Int[Tensor, "B L"]) -> int:
        """Columns that a mask has for `context`."""
        return 0 if self.is_paged else kv_slots.shape[1]

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
        # An embedding look-up copies whole rows; indexing walks single elements.
        rows = embedding(kv_slots, self._rows.flatten(1)).masked_fill_(~is_live[..., None], 0)
        return self._split(rows.view(*kv_slots.shape, *self._rows.shape[1:]))

    @staticmethod
    def _split(rows: Float[Tensor, "*T n 2 G C"]) -> list[LayerKV]:
        return [LayerKV(layer[..., 0, :, :], layer[..., 1, :, :]) for layer in rows.unbind(-4)]


def live_columns(lengths: Int[Tensor, " B"], num_columns: int) -> Bool[Tensor, "B L"]:
    """Which columns lie before each length."""
    return torch.arange(num_columns, device=lengths.device) < lengths[:, None]
