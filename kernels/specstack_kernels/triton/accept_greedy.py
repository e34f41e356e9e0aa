"""Triton twin of `reference.accept_greedy`: one warp per request, the path in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.types import Walk


@triton.jit
def _accept_greedy_kernel(
    draft_tokens,  # [B, N]
    parent_index,  # [B, N]
    num_nodes,  # [B]
    target_predict,  # [B, N]
    accept_index,  # [B, K]
    accept_lens,  # [B]
    emitted,  # [B, K]
    nodes,
    width,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = request * nodes
    node = tl.arange(0, BLOCK_N)
    is_live = (node > 0) & (node < tl.minimum(tl.load(num_nodes + request), nodes))
    parent = tl.load(parent_index + row + node, mask=is_live, other=-1).to(tl.int32)
    token = tl.load(draft_tokens + row + node, mask=is_live, other=0)
    expected = tl.load(target_predict + row + parent, mask=is_live, other=0)
    # Whether a draft is correct, given that its parent is, does not depend on the walk.
    parent = tl.where(is_live & (token == expected), parent, -1)

    step = tl.arange(0, BLOCK_K)
    path = tl.where(step == 0, 0, -1)
    length = 1
    child = tl.min(tl.where(parent == 0, node, BLOCK_N))
    while (child < BLOCK_N) & (length < width):
        path = tl.where(step == length, child, path)
        length += 1
        child = tl.min(tl.where(parent == child, node, BLOCK_N))

    on_path = path >= 0
    bonus_or_draft = tl.load(target_predict + row + path, mask=on_path, other=0)
    out = request * width + step
    tl.store(accept_index + out, path.to(tl.int64), mask=step < width)
    tl.store(emitted + out, bonus_or_draft, mask=step < width)
    tl.store(accept_lens + request, length)


def accept_greedy(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    target_predict: Int[Tensor, "B N"],
    *,
    max_depth: int,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1. Host sync: none."""
    batch, nodes = draft_tokens.shape
    device, width = draft_tokens.device, max_depth + 1
    walk = Walk.unwritten(batch, width, device)
    if batch == 0:
        return walk
    _accept_greedy_kernel[(batch,)](
        draft_tokens.contiguous(),
        parent_index.contiguous(),
        num_nodes.contiguous(),
        target_predict.contiguous(),
        walk.accept_index,
        walk.accept_lens,
        walk.emitted,
        nodes,
        width,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_K=triton.next_power_of_2(width),
        num_warps=1,
    )
    return walk


def aot_cases() -> list[AotCase]:
    """Trees of 16 to 256 nodes, up to 16 deep."""
    names = "draft_tokens parent_index num_nodes target_predict accept_index accept_lens emitted"
    signature = {**dict.fromkeys(names.split(), "*i64"), "nodes": "i32", "width": "i32"}
    return [
        AotCase(
            name=f"accept_greedy N{nodes} K16",
            kernel=_accept_greedy_kernel,
            signature=signature,
            constexprs={"BLOCK_N": nodes, "BLOCK_K": 16},
            num_warps=1,
        )
        for nodes in (16, 64, 256)
    ]
