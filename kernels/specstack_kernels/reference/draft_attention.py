"""Attention of a draft block over injected context in a paged pool and itself: the definition.

DFlash's attention (arXiv 2602.06036, KV injection): queries come from the block alone, keys and
values from the verified tokens' rows of the pool and from the block. Every query sees all of the
context; `mask` says which slots of the block it sees, all of them (bidirectional) or its ancestors
(JetFlow, 2606.18394; a refreshed tree). The softmax runs over both together. A verify step of the
target is the same attention with the tree's nodes as the block.

Letters: B requests, Q slots of the block, L context columns, S pool rows (KV slots), H query heads,
G KV heads (head h reads KV head h // (H / G)), C head size.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
    """Return what each query reads; one that sees nothing reads zeros.

    Args:
        pool_keys: rotated; a view with any row stride, as `DraftPool` keeps its layers.
        kv_slots: pool row of each context token; pages of any size are spelled out token by token.
        seq_lens: context of each request, at most L. Later columns may hold anything, and pool
            rows that no request names may hold NaN.
        keys: of the block, rotated; NaN is allowed in a slot that no query sees, and in its values.
        mask: row sees column.
        scale: of the scores; 1 / sqrt(C) by default.
    """
    batch, num_queries, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    output = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for b in range(batch):
        rows = kv_slots[b, : int(seq_lens[b])]
        for q in range(num_queries):
            for h in range(num_heads):
                g = h // group
                own = mask[b, q].nonzero()[:, 0]
                seen_keys = torch.cat([pool_keys[rows, g], keys[b, own, g]]).double()
                seen_values = torch.cat([pool_values[rows, g], values[b, own, g]]).double()
                if len(seen_keys) == 0:
                    continue
                weights = torch.softmax(scale * (seen_keys @ queries[b, q, h].double()), dim=0)
                output[b, q, h] = (weights @ seen_values).to(output.dtype)
    return output
