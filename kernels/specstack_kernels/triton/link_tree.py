"""Triton twin of `reference.link_tree`: one program per request and block of rows, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.types import LinkedTree

CELLS = 8192
"""Of the mask, per program."""


@triton.jit
def _link_tree_kernel(
    parent_index,  # [B, N]
    num_nodes,  # [B]
    depth,  # [B, N]
    tree_mask,  # [B, N, N]
    next_token,  # [B, N]
    next_sibling,  # [B, N]
    nodes,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    live_nodes = tl.minimum(tl.load(num_nodes + request), nodes).to(tl.int32)
    parents = parent_index + request * nodes
    column = tl.arange(0, BLOCK_N)
    is_live = (column > 0) & (column < live_nodes)
    column_parent = tl.load(parents + column, mask=is_live, other=-2).to(tl.int32)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_is_live = (row > 0) & (row < live_nodes)
    row_parent = tl.load(parents + row, mask=row_is_live, other=-1).to(tl.int32)

    # Climb all rows at once; a row that has reached the root stays there. Dead rows climb to it.
    at = row
    level = tl.zeros([BLOCK_ROWS], dtype=tl.int64)
    sees = column[None, :] == row[:, None]  # [rows, N]
    left = tl.max(at)
    while left > 0:
        level += (at > 0).to(tl.int64)
        at = tl.load(parents + at, mask=(at > 0) & (at < live_nodes), other=0).to(tl.int32)
        sees = sees | (column[None, :] == at[:, None])
        left = tl.max(at)

    child = tl.where(column_parent[None, :] == row[:, None], column[None, :], BLOCK_N)
    child = tl.min(child, axis=1)
    is_sibling = (column_parent[None, :] == row_parent[:, None]) & (column[None, :] > row[:, None])
    sibling = tl.min(tl.where(is_sibling, column[None, :], BLOCK_N), axis=1)

    out = request * nodes + row
    is_row = row < nodes
    tl.store(depth + out, level, mask=is_row)
    tl.store(next_token + out, tl.where(child < BLOCK_N, child, -1).to(tl.int64), mask=is_row)
    tl.store(next_sibling + out, tl.where(sibling < BLOCK_N, sibling, -1).to(tl.int64), mask=is_row)
    cells = tree_mask + out[:, None] * nodes + column[None, :]
    tl.store(cells, sees, mask=is_row[:, None] & (column < nodes)[None, :])


def link_tree(
    parent_index: Int[Tensor, "B N"], num_nodes: Int[Tensor, " B"], *, max_depth: int
) -> LinkedTree:
    """Return what follows from the parents; how deep a tree is shows by climbing it.

    Host sync: none.
    """
    batch, nodes = parent_index.shape
    linked = LinkedTree(
        depth=torch.empty((batch, nodes), dtype=torch.int64, device=parent_index.device),
        tree_mask=torch.empty((batch, nodes, nodes), dtype=torch.bool, device=parent_index.device),
        retrieve_next_token=torch.empty_like(parent_index, memory_format=torch.contiguous_format),
        retrieve_next_sibling=torch.empty_like(parent_index, memory_format=torch.contiguous_format),
    )
    if batch == 0:
        return linked
    block = _block_sizes(nodes)
    _link_tree_kernel[(batch, triton.cdiv(nodes, block["BLOCK_ROWS"]))](
        parent_index.contiguous(), num_nodes.contiguous(), *linked, nodes, **block
    )
    return linked


def _block_sizes(nodes: int) -> dict[str, int]:
    block = triton.next_power_of_2(nodes)
    return {"BLOCK_N": block, "BLOCK_ROWS": min(block, max(1, CELLS // block))}


def aot_cases() -> list[AotCase]:
    """Trees of 16 to 1024 nodes."""
    numbers = ("parent_index", "num_nodes", "depth", "next_token", "next_sibling")
    signature = {**dict.fromkeys(numbers, "*i64"), "tree_mask": "*i1", "nodes": "i32"}
    return [
        AotCase(
            name=f"link_tree N{nodes}",
            kernel=_link_tree_kernel,
            signature=signature,
            constexprs=_block_sizes(nodes),
        )
        for nodes in (16, 64, 256, 1024)
    ]
