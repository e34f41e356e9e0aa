"""FlashInfer's paged prefill attention as `reference.draft_attention`, planned once, run per layer.

One adapter for two uses that differ only in whose pool it reads: a draft block over the head's
pool, and the nodes of the target's verify step over the target's. FlashInfer reads keys and values
from the pool alone, so the block's own are written to their slots first; its mask covers prefix and
block, packed to bits.

All buffers are allocated once, at the largest context, so that CUDA graphs may capture `run`. The
batch and the number of queries are fixed: a graph has one adapter per size, and adapters may share
a workspace. Differences from the reference: slots that no query sees must hold finite keys and
values (a weight of zero does not stop a NaN), and L is bounded by `max_context`.

Letters: B requests, Q slots of the block, L context columns, S pool rows, H query heads,
G KV heads, C head size, T page-table entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int32, UInt8
from torch import Tensor

from specstack_kernels import ops
from specstack_kernels.reference.pack_bits import count_mask_bytes

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends."""


@dataclass(frozen=True)
class TreeAttentionSizes:
    """What an adapter is built for."""

    batch: int
    """B, exactly."""
    queries: int
    """Q, exactly."""
    max_context: int
    """The largest sequence length."""
    heads: int
    kv_heads: int
    head_dim: int


class TreeAttention:
    """Attention of Q queries per request over a paged prefix and over each other under a mask."""

    def __init__(
        self,
        sizes: TreeAttentionSizes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: float | None = None,
        workspace: UInt8[Tensor, " W"] | None = None,
    ) -> None:
        """Allocate everything.

        Args:
            scale: of the scores; 1 / sqrt(C) by default.
            workspace: shared with other adapters that do not run at the same time.

        Raises:
            ValueError: the mask does not fit FlashInfer's 32-bit offsets.
        """
        self._sizes, self._dtype, self._scale = sizes, dtype, scale
        batch, columns = sizes.batch, sizes.max_context + sizes.queries
        mask_bytes = count_mask_bytes([sizes.max_context] * batch, sizes.queries)
        if mask_bytes >= 2**31:
            raise ValueError(f"a packed mask of {mask_bytes} bytes needs more than 32-bit offsets")

        def int32(count: int) -> Int32[Tensor, " n"]:
            return torch.zeros(count, dtype=torch.int32, device=device)

        def uint8(count: int) -> UInt8[Tensor, " n"]:
            return torch.zeros(count, dtype=torch.uint8, device=device)

        self._byte_offsets = int32(batch + 1)
        self._wrapper = _wrapper_class()(
            uint8(WORKSPACE_BYTES) if workspace is None else workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=int32(batch + 1),
            paged_kv_indptr_buf=int32(batch + 1),
            paged_kv_indices_buf=int32(batch * columns),
            paged_kv_last_page_len_buf=int32(batch),
            custom_mask_buf=uint8(mask_bytes),
            mask_indptr_buf=self._byte_offsets,
            backend="fa2",  # fa3 takes no custom mask
        )

    def plan(
        self,
        kv_slots: Int[Tensor, "B L"],
        seq_lens: Int[Tensor, " B"],
        block_slots: Int[Tensor, "B Q"],
        mask: Bool[Tensor, "B Q Q"],
        *,
        seq_lens_cpu: Sequence[int],
    ) -> None:
        """Prepare a step. Host sync: none; not to be captured.

        Args:
            block_slots: where the block's own keys and values are.
            seq_lens_cpu: the same as `seq_lens`: FlashInfer shares out work on the host.

        Raises:
            ValueError: a prefix is longer than `max_context`.
        """
        sizes = self._sizes
        if max(seq_lens_cpu) > sizes.max_context:
            raise ValueError(f"a prefix of {max(seq_lens_cpu)} tokens, at most {sizes.max_context}")
        num_pages = [length + sizes.queries for length in seq_lens_cpu]
        indices = _page_table(kv_slots, seq_lens, block_slots, num_entries=sum(num_pages))
        tree = ops.pack_tree_mask(mask, seq_lens, num_tokens=sum(seq_lens_cpu))
        num_bytes = count_mask_bytes(seq_lens_cpu, sizes.queries)
        bits = ops.pack_bits(tree.full, tree.offsets, num_bytes=num_bytes)
        self._wrapper.plan(
            torch.arange(sizes.batch + 1, dtype=torch.int32) * sizes.queries,
            torch.tensor([0, *num_pages]).cumsum(0).to(torch.int32),
            indices,
            torch.ones(sizes.batch, dtype=torch.int32),
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            1,
            packed_custom_mask=bits.packed,
            causal=False,
            sm_scale=self._scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        # FlashInfer counts in bytes when it packs a mask itself, but leaves offsets in flags beside
        # one that comes packed (github.com/flashinfer-ai/flashinfer/pull/2201, open at 0.7.2). Its
        # kernel adds them to a pointer to bytes.
        self._byte_offsets.copy_(bits.byte_offsets)

    def run(
        self,
        queries: Float[Tensor, "B Q H C"],
        pool_keys: Float[Tensor, "S G C"],
        pool_values: Float[Tensor, "S G C"],
    ) -> Float[Tensor, "B Q H C"]:
        """Attend in one layer, whose block is in the pool already. Host sync: none.

        Args:
            pool_keys: a view with any row stride, as in `reference.draft_attention`; if the values
                have other strides, FlashInfer builds one more kernel.
        """
        pages = (pool_keys[:, None], pool_values[:, None])  # one entry per page
        output: Tensor = self._wrapper.run(queries.flatten(0, 1), pages)
        return output.view(queries.shape)


def _wrapper_class() -> Any:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper


def _page_table(
    kv_slots: Int[Tensor, "B L"],
    seq_lens: Int[Tensor, " B"],
    block_slots: Int[Tensor, "B Q"],
    *,
    num_entries: int,
) -> Int32[Tensor, " T"]:
    """The slots of each request's prefix, then of its block, requests one after another.

    Host sync: none.
    """
    num_columns = kv_slots.shape[1]
    lengths = seq_lens + block_slots.shape[1]
    ends = lengths.cumsum(0)
    entry = torch.arange(num_entries, device=kv_slots.device)
    request = torch.searchsorted(ends, entry, right=True)
    column = entry - (ends - lengths)[request]
    own = column - seq_lens[request]  # negative in the prefix
    column = torch.where(own < 0, column, num_columns + own)
    return torch.cat([kv_slots, block_slots], dim=1)[request, column].to(torch.int32)
