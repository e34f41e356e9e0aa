"""KV pool without Triton: torch row moves and row writes, plus the writers of `req_to_token`.

Letters: B requests, N slots per request, R rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from specstack_serving import sglang_compat as sgl


class CpuMHATokenToKVPool(sgl.MHATokenToKVPool):  # type: ignore[misc]
    """The in-tree multi-head pool with its two Triton uses replaced."""

    def _init_kv_copy_and_warmup(self) -> None:
        """Skip the launch of the Triton copy kernel that the base uses to warm up."""
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: Int[Tensor, " R"], src_loc: Int[Tensor, " R"]) -> None:
        """Copy rows `src_loc` to `tgt_loc` in every layer; the two may overlap.

        Sources are read completely before any target is written, as if all moves happened at once.
        """
        src, tgt = src_loc.long(), tgt_loc.long()
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer.index_copy_(0, tgt, buffer.index_select(0, src))

    def _store_kv_layer(
        self, layer_idx: int, loc: Int[Tensor, " T"], cache_k: Tensor, cache_v: Tensor
    ) -> None:
        self.k_buffer[layer_idx].index_copy_(0, loc, cache_k)
        self.v_buffer[layer_idx].index_copy_(0, loc, cache_v)


def assign_req_to_token_pool(
    req_pool_indices: Int[Tensor, " B"],
    req_to_token: Int[Tensor, "R W"],
    start_offset: Int[Tensor, " B"],
    end_offset: Int[Tensor, " B"],
    out_cache_loc: Int[Tensor, " T"],
    batch_size: int,
) -> None:
    """Write each request's new slots into its row at [start, end).

    Same contract as the Triton writer, except that it refuses what that one would write past the
    end of a row, into the next request's slots.
    """
    starts, ends = start_offset.tolist(), end_offset.tolist()
    width = req_to_token.shape[1]
    if (
        min(starts) < 0
        or max(ends) > width
        or any(a > b for a, b in zip(starts, ends, strict=True))
    ):
        raise ValueError(
            f"slots for columns [{starts}, {ends}) do not fit a row of {width} columns of the"
            " request-to-token table"
        )
    total = sum(ends) - sum(starts)
    if total != out_cache_loc.numel():
        raise ValueError(f"{total} columns to fill, but {out_cache_loc.numel()} slots were given")
    # Views: 12 us for a batch of 16, where a dozen torch calls take 45.
    table, slots, done = req_to_token.numpy(), out_cache_loc.numpy(), 0
    for row, start, end in zip(req_pool_indices.tolist(), starts, ends, strict=True):
        table[row, start:end] = slots[done : done + end - start]
        done += end - start


def get_last_loc(
    req_to_token: Int[Tensor, "R W"],
    req_pool_indices_tensor: Int[Tensor, " B"],
    prefix_lens_tensor: Int[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """Slot of each request's last token, -1 where it has none; pages continue behind it."""
    last = req_to_token[req_pool_indices_tensor.long(), prefix_lens_tensor.long() - 1]
    return torch.where(prefix_lens_tensor > 0, last, -1).to(prefix_lens_tensor.dtype)


def speculative_cache_locs(
    *,
    req_pool_indices: Int[Tensor, " B"],
    req_to_token: Int[Tensor, "R W"],
    start_offset: Int[Tensor, " B"],
    end_offset: Int[Tensor, " B"],
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Int[Tensor, " B*N"]:
    """Slots of each request's window [start, start + N), row after row."""
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], columns].long().reshape(-1)
