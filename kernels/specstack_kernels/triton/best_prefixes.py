"""Triton twin of `reference.best_prefixes`: one program per request, its frontier in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.reference.best_prefixes import count_prefixes
from specstack_kernels.torch_ops.best_prefixes import best_prefixes as in_torch
from specstack_kernels.types import Prefixes

# An entry of the frontier is one int64, the least of which is popped next: the bits of
# -path_log_q, then its place, which is the order of ties: depth, parent (from 1, 0 is the root),
# rank.
COST_SHIFT = tl.constexpr(32)
PER_DEPTH = tl.constexpr(1 << 20)
PER_PARENT = tl.constexpr(1 << 10)
INFINITY_BITS = tl.constexpr(0x7F800000)
UNUSED = tl.constexpr(0x7FFFFFFFFFFFFFFF)
MAX_DRAFTS = 512
"""So that depth, parent and rank fit into 10 bits each."""
NUM_WARPS = 1
"""Two reductions a pop: within one warp they need no barrier."""


def best_prefixes(
    tokens: Int[Tensor, "B K W"], log_q: Float[Tensor, "B K W"], num_drafts: int
) -> Prefixes:
    """Return the S = min(num_drafts, number of prefixes) best of each request. Host sync: none.

    More drafts than `MAX_DRAFTS` are ranked by `torch_ops`: no verify step is that wide.

    Args:
        log_q: <= 0 and best first in each depth; -inf: no candidate.
    """
    batch, num_depths, width = log_q.shape
    assert log_q.dtype == torch.float32, f"log q in {log_q.dtype}"
    num_kept = count_prefixes(num_depths, width, num_drafts)
    if num_kept > MAX_DRAFTS:
        return in_torch(tokens, log_q, num_drafts)
    tokens, log_q = tokens.contiguous(), log_q.contiguous()
    chosen = tokens.new_empty((batch, num_kept))
    prefixes = Prefixes(
        chosen,
        torch.empty_like(chosen),
        log_q.new_empty((batch, num_kept)),
        log_q.new_empty((batch, num_kept)),
    )
    if batch * num_kept > 0:
        _best_prefixes_kernel[(batch,)](
            tokens,
            log_q,
            *prefixes,
            min(num_depths, num_kept),
            num_depths * width,
            width,
            num_kept,
            BLOCK_S=triton.next_power_of_2(num_kept),
            num_warps=NUM_WARPS,
        )
    return prefixes


@triton.jit
def _entry(path_log_q, place):
    cost = (0.0 - path_log_q).to(tl.int32, bitcast=True).to(tl.int64)
    return (cost << COST_SHIFT) | place


@triton.jit
def _cost(entry):
    return (entry >> COST_SHIFT).to(tl.int32)


@triton.jit
def _path_log_q(cost):
    return 0.0 - cost.to(tl.float32, bitcast=True)


@triton.jit
def _best_prefixes_kernel(
    tokens,
    log_q,
    out_tokens,
    out_parent,
    out_log_q,
    out_path,
    num_depths,
    row_size,
    width,
    num_kept,
    BLOCK_S: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    tokens += request * row_size
    log_q += request * row_size
    slot = tl.arange(0, BLOCK_S)
    # Every pop puts its next sibling in its place and its first child behind the last entry.
    frontier = tl.where(slot == 0, _entry(tl.load(log_q), 0), UNUSED)
    popped = tl.full((BLOCK_S,), UNUSED, tl.int64)
    for step in range(num_kept):
        entry = tl.min(frontier, 0)
        popped = tl.where(slot == step, entry, popped)
        place = entry.to(tl.int32)  # the low half
        depth = place // PER_DEPTH
        parent = place % PER_DEPTH // PER_PARENT
        rank = place % PER_PARENT
        is_live = _cost(entry) < INFINITY_BITS
        # The parent's cost, from where it stands among the popped ones; the root has none.
        above = tl.sum(tl.where(slot == parent - 1, _cost(popped), 0), 0)
        here = log_q + depth * width
        sibling = tl.load(here + rank + 1, mask=is_live & (rank + 1 < width), other=-float("inf"))
        child = tl.load(here + width, mask=is_live & (depth + 1 < num_depths), other=-float("inf"))
        sibling = _entry(_path_log_q(above) + sibling, place + 1)
        child_place = (depth + 1) * PER_DEPTH + (step + 1) * PER_PARENT
        child = _entry(_path_log_q(_cost(entry)) + child, child_place)
        frontier = tl.where(frontier == entry, sibling, frontier)
        frontier = tl.where(slot == step + 1, child, frontier)

    is_kept = slot < num_kept
    is_live = is_kept & (_cost(popped) < INFINITY_BITS)
    place = popped.to(tl.int32)
    candidate = place // PER_DEPTH * width + place % PER_PARENT
    parent = tl.where(is_live, place % PER_DEPTH // PER_PARENT - 1, -1)
    token = tl.load(tokens + candidate, mask=is_live, other=0)
    own_log_q = tl.load(log_q + candidate, mask=is_live, other=-float("inf"))
    path_log_q = tl.where(is_live, _path_log_q(_cost(popped)), -float("inf"))
    out = request * num_kept + slot
    tl.store(out_tokens + out, token, mask=is_kept)
    tl.store(out_parent + out, parent.to(tl.int64), mask=is_kept)
    tl.store(out_log_q + out, own_log_q, mask=is_kept)
    tl.store(out_path + out, path_log_q, mask=is_kept)


def aot_cases() -> list[AotCase]:
    """Budgets up to 256 drafts."""
    signature = {
        "tokens": "*i64",
        "log_q": "*fp32",
        "out_tokens": "*i64",
        "out_parent": "*i64",
        "out_log_q": "*fp32",
        "out_path": "*fp32",
        **dict.fromkeys(("num_depths", "row_size", "width", "num_kept"), "i32"),
    }
    return [
        AotCase(
            f"best_prefixes S{block}",
            _best_prefixes_kernel,
            signature,
            {"BLOCK_S": block},
            num_warps=NUM_WARPS,
        )
        for block in (16, 64, 256)
    ]
