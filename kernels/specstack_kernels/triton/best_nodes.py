"""Triton twin of `reference.best_nodes`: one program per request, all candidates in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.torch_ops.best_nodes import best_nodes as in_torch
from specstack_kernels.types import BestNodes

COST_SHIFT = tl.constexpr(32)
TAKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)
MAX_CANDIDATES = 4096
"""What a program holds in registers without spilling them."""


def best_nodes(
    parent_index: Int[Tensor, "B M"],
    log_q: Float[Tensor, "B M"],
    num_drafts: int,
    *,
    max_depth: int,
) -> BestNodes:
    """Return the S = min(num_drafts, M) best candidates of each request. Host sync: none.

    More candidates than `MAX_CANDIDATES` are ranked by `torch_ops`.

    Args:
        parent_index: a candidate before this one, or -1 for the root; of a slot without a
            candidate any number in [-1, M).
        log_q: given the parent, <= 0; -inf: no candidate.
        max_depth: at least 1; what is deeper counts as no candidate.
    """
    batch, num_candidates = log_q.shape
    assert log_q.dtype == torch.float32, f"log q in {log_q.dtype}"
    if num_candidates > MAX_CANDIDATES:
        return in_torch(parent_index, log_q, num_drafts, max_depth=max_depth)
    num_kept = min(num_drafts, num_candidates)
    order = parent_index.new_empty((batch, num_kept))
    best = BestNodes(order, log_q.new_empty((batch, num_kept)), torch.empty_like(order))
    if batch * num_kept > 0:
        block = triton.next_power_of_2(num_candidates)
        _best_nodes_kernel[(batch,)](
            parent_index.contiguous(),
            log_q.contiguous(),
            *best,
            num_candidates,
            num_kept,
            min(max_depth, num_candidates),
            BLOCK_M=block,
            num_warps=_num_warps(block),
        )
    return best


def _num_warps(block: int) -> int:
    """16 candidates per thread: warps that wait for each other in every round cost more."""
    return min(max(block // 512, 1), 8)


@triton.jit
def _best_nodes_kernel(
    parent_index,
    log_q,
    out_order,
    out_path,
    out_parent,
    num_candidates,
    num_kept,
    max_depth,
    BLOCK_M: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_M)
    is_candidate = candidate < num_candidates
    row = request * num_candidates + candidate
    parent = tl.load(parent_index + row, mask=is_candidate, other=-1).to(tl.int32)
    own_log_q = tl.load(log_q + row, mask=is_candidate, other=-float("inf"))
    at_root = parent < 0
    parent = tl.maximum(parent, 0)
    path_log_q = tl.where(at_root, own_log_q, -float("inf"))
    for _ in range(1, max_depth):
        above = tl.gather(path_log_q, parent, 0)
        path_log_q = tl.where(at_root, 0.0, above) + own_log_q

    # The least number is the next: bits of -path_log_q, then the candidate. What rounding lifted
    # above 0 counts as 0.
    cost = tl.maximum(0.0 - path_log_q, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    rest = tl.where(is_candidate, (cost << COST_SHIFT) | candidate, TAKEN)
    node = tl.zeros((BLOCK_M,), tl.int32)  # of the tree to build, 0: not chosen
    for rank in range(num_kept):
        is_best = rest == tl.min(rest, 0)
        node = tl.where(is_best, rank + 1, node)
        rest = tl.where(is_best, TAKEN, rest)

    is_inner = (path_log_q > -float("inf")) & (at_root == 0)
    parent_node = tl.where(is_inner, tl.gather(node, parent, 0), 0)
    is_chosen = node > 0
    out = request * num_kept + node - 1
    tl.store(out_order + out, candidate.to(tl.int64), mask=is_chosen)
    tl.store(out_path + out, path_log_q, mask=is_chosen)
    tl.store(out_parent + out, parent_node.to(tl.int64), mask=is_chosen)


def aot_cases() -> list[AotCase]:
    """Tries of up to 4,096 candidates."""
    signature = {
        "parent_index": "*i64",
        "log_q": "*fp32",
        "out_order": "*i64",
        "out_path": "*fp32",
        "out_parent": "*i64",
        **dict.fromkeys(("num_candidates", "num_kept", "max_depth"), "i32"),
    }
    return [
        AotCase(
            f"best_nodes M{block}",
            _best_nodes_kernel,
            signature,
            {"BLOCK_M": block},
            num_warps=_num_warps(block),
        )
        for block in (64, 512, 4096)
    ]
