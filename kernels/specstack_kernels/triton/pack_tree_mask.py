"""Triton twin of `reference.pack_tree_mask`: one program per node and share of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.types import PackedTreeMask

BLOCK_T = 2048
"""Flags that a program writes at a time."""
ALIGNMENT = tl.constexpr(16)
"""Bytes of the widest store of a thread."""
MIN_PROGRAMS = 1024
"""Rows are shared out among programs until there are so many, as a GPU holds about a thousand."""


def pack_tree_mask(
    tree_mask: Bool[Tensor, "B N N"], seq_lens: Int[Tensor, " B"], *, num_tokens: int
) -> PackedTreeMask:
    """Return N rows of seq_len + N flags per request. Host sync: none.

    Args:
        num_tokens: the sum of `seq_lens`, which the host knows.
    """
    batch, nodes = tree_mask.shape[:2]
    device = tree_mask.device
    size = batch * nodes * nodes + nodes * num_tokens
    packed = PackedTreeMask(
        torch.empty(size, dtype=torch.bool, device=device),
        torch.empty(batch + 1, dtype=torch.int64, device=device),
    )
    longest = triton.cdiv(num_tokens + nodes, BLOCK_T) + 1  # rows need not start at a block
    shares = min(longest, triton.cdiv(MIN_PROGRAMS, batch * nodes))
    _pack_tree_mask_kernel[(batch, nodes, shares)](
        tree_mask.contiguous(),
        seq_lens.contiguous(),
        *packed,
        batch,
        nodes,
        shares,
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_T=BLOCK_T,
    )
    return packed


@triton.jit
def _pack_tree_mask_kernel(
    tree_mask,
    seq_lens,
    full,
    offsets,
    batch,
    nodes,
    shares,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    request, node, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    other = tl.arange(0, BLOCK_B)
    lens = tl.load(seq_lens + other, mask=other < batch, other=0).to(tl.int64) + nodes
    first = tl.sum(tl.where(other < request, lens, 0), 0) * nodes
    seq_len = tl.load(seq_lens + request).to(tl.int64)
    row_len = seq_len + nodes
    if (node == 0) & (share == 0):
        tl.store(offsets + request + 1, first + row_len * nodes)
        if request == 0:
            tl.store(offsets, first)
    row_start = first + node * row_len
    row_end = row_start + row_len
    tree_mask += (request.to(tl.int64) * nodes + node) * nodes - seq_len
    # In aligned units, so that the tiles that lie in the prefix, nearly all, are wide stores.
    TILE: tl.constexpr = BLOCK_T // ALIGNMENT
    first_unit = row_start // ALIGNMENT + share * TILE
    for unit in range(first_unit, tl.cdiv(row_end, ALIGNMENT), shares * TILE):
        start = unit * ALIGNMENT
        place = start + tl.arange(0, BLOCK_T)
        if (start >= row_start) & (start + BLOCK_T <= row_start + seq_len):
            tl.store(full + place, tl.full((BLOCK_T,), 1, tl.int1))
        else:
            column = place - row_start
            is_column = (column >= 0) & (place < row_end)
            flag = tl.load(tree_mask + column, mask=is_column & (column >= seq_len), other=True)
            tl.store(full + place, flag, mask=is_column)


def aot_cases() -> list[AotCase]:
    """Batches up to 256."""
    signature = {
        "tree_mask": "*i1",
        "seq_lens": "*i64",
        "full": "*i1",
        "offsets": "*i64",
        **dict.fromkeys(("batch", "nodes", "shares"), "i32"),
    }
    return [
        AotCase(
            f"pack_tree_mask B{block}",
            _pack_tree_mask_kernel,
            signature,
            {"BLOCK_B": block, "BLOCK_T": BLOCK_T},
        )
        for block in (1, 64, 256)
    ]
