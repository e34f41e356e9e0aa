"""Attention of a draft block over paged context and itself, with torch's own attention.

Context rows are gathered into one tensor per call. A mask does not stop a NaN, so whatever nobody
sees is gathered as zero. Letters: B requests, Q slots of the block, L context columns, S pool rows,
H query heads, G KV heads, C head size.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def draft_attention(
    queries: Float[Tensor, "B Q H C"],
    pool_keys: Float[Tensor, "S G C"],
    pool_values: Float[Tensor, "S G C"],
    kv_slots: Int[Tensor, "B L"],
    seq_lens: Int[Tensor, " B"],
    keys: Float[Tensor, "B Q G C"],
    values: Float[Tensor, "B Q G C"],
    mask: Bool[Tensor, "B Q Q"],
    *,
    scale: float | None = None,
) -> Float[Tensor, "B Q H C"]:
    """As `reference.draft_attention`. Host sync: none."""
    num_columns = kv_slots.shape[1]
    is_live = torch.arange(num_columns, device=seq_lens.device) < seq_lens[:, None]  # [B, L]
    is_unseen = torch.cat([~is_live, ~mask.any(dim=1)], dim=1)[..., None, None]
    rows = torch.where(is_live, kv_slots, 0)
    all_keys = torch.cat([_gather(pool_keys, rows), keys], dim=1).masked_fill_(is_unseen, 0)
    all_values = torch.cat([_gather(pool_values, rows), values], dim=1).masked_fill_(is_unseen, 0)
    context = is_live[:, None].expand(-1, queries.shape[1], -1)
    sees = torch.cat([context, mask], dim=-1)  # [B, Q, L + Q]
    sees_any = sees.any(dim=-1, keepdim=True)
    output = scaled_dot_product_attention(
        queries.transpose(1, 2),
        all_keys.transpose(1, 2),
        all_values.transpose(1, 2),
        attn_mask=(sees | ~sees_any)[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return output.transpose(1, 2) * sees_any[..., None]


def _gather(pool: Float[Tensor, "S G C"], rows: Int[Tensor, "B L"]) -> Float[Tensor, "B L G C"]:
    # Copies whole rows; indexing walks single elements on the CPU.
    return pool.index_select(0, rows.flatten()).view(*rows.shape, *pool.shape[1:])
