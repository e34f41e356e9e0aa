"""Triton twin of `reference.score_frontier`: one program per request and block of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.torch_ops.score_frontier import score_frontier as in_torch
from specstack_kernels.types import ScoredFrontier

BLOCK_F = 16
"""Fewest rows of a matrix instruction."""
MAX_CANDIDATES = 512
"""What a program holds of a node."""


@triton.jit(do_not_specialize=["num_nodes"])
def _score_frontier_kernel(
    state_ptr,
    rows_ptr,
    base_ptr,
    rest_ptr,
    log_q_ptr,
    best_index_ptr,
    best_log_q_ptr,
    num_nodes,
    state_request_stride,
    state_node_stride,
    rows_request_stride,
    rows_candidate_stride,
    base_request_stride,
    rest_request_stride,
    NUM_CANDIDATES: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    nodes = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    candidates = tl.arange(0, BLOCK_C)
    is_node, is_candidate = nodes < num_nodes, candidates < NUM_CANDIDATES
    states = state_ptr + request * state_request_stride + nodes[:, None] * state_node_stride
    rows = rows_ptr + request * rows_request_stride + candidates[None, :] * rows_candidate_stride
    correction = tl.zeros([BLOCK_F, BLOCK_C], dtype=tl.float32)
    for start in range(0, RANK, BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        is_rank = ranks < RANK
        state = tl.load(
            states + ranks[None, :], mask=is_node[:, None] & is_rank[None, :], other=0.0
        )
        row = tl.load(
            rows + ranks[:, None], mask=is_candidate[None, :] & is_rank[:, None], other=0.0
        )
        correction = tl.dot(state, row, correction, input_precision="ieee")

    base = tl.load(
        base_ptr + request * base_request_stride + candidates,
        mask=is_candidate,
        other=-float("inf"),
    )
    rest = tl.load(rest_ptr + request * rest_request_stride).to(tl.float32)
    corrected = base.to(tl.float32)[None, :] + correction
    largest = tl.maximum(tl.max(corrected, axis=1), rest)
    weight = tl.sum(tl.exp(corrected - largest[:, None]), axis=1) + tl.exp(rest - largest)
    log_q = corrected - (largest + tl.log(weight))[:, None]
    nodes_out = request * num_nodes + nodes  # int64
    tl.store(
        log_q_ptr + nodes_out[:, None] * NUM_CANDIDATES + candidates[None, :],
        log_q,
        mask=is_node[:, None] & is_candidate[None, :],
    )

    # Distinct integer keys in the order of (log q, -index); they hold both.
    bits = log_q.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (BLOCK_C - 1 - candidates)[None, :].to(tl.int64)
    best = tl.topk(tl.where(is_candidate[None, :], keys, -0x7FFFFFFFFFFFFFFF), BLOCK_W)
    ordered = (best >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    ranks = tl.arange(0, BLOCK_W)
    is_best = is_node[:, None] & (ranks < WIDTH)[None, :]
    places = nodes_out[:, None] * WIDTH + ranks[None, :]
    tl.store(best_index_ptr + places, BLOCK_C - 1 - (best & 0xFFFFFFFF), mask=is_best)
    tl.store(best_log_q_ptr + places, bits.to(tl.float32, bitcast=True), mask=is_best)


def score_frontier(
    state: Float[Tensor, "B F R"],
    rows: Float[Tensor, "B C R"],
    base: Float[Tensor, "B C"],
    rest: Float[Tensor, " B"],
    *,
    width: int,
) -> ScoredFrontier:
    """Return log q of all candidates and each node's best `width`. Host sync: none.

    State and rows have one dtype and a contiguous last axis, base too. More candidates than
    `MAX_CANDIDATES` are scored by `torch_ops`.
    """
    batch, nodes, rank = state.shape
    candidates = rows.shape[1]
    width = min(width, candidates)
    if candidates > MAX_CANDIDATES:
        return in_torch(state, rows, base, rest, width=width)
    assert state.stride(2) == rows.stride(2) == base.stride(1) == 1
    log_q = torch.empty((batch, nodes, candidates), dtype=torch.float32, device=state.device)
    best_log_q = log_q.new_empty((batch, nodes, width))
    best_index = torch.empty((batch, nodes, width), dtype=torch.int64, device=state.device)
    if batch and nodes:
        _score_frontier_kernel[triton.cdiv(nodes, BLOCK_F), batch](
            state, rows, base, rest, log_q, best_index, best_log_q,
            nodes,
            state.stride(0), state.stride(1), rows.stride(0), rows.stride(1),
            base.stride(0), rest.stride(0),
            **_constants(candidates, rank, width),
        )  # fmt: skip
    return ScoredFrontier(log_q, best_index, best_log_q)


def _constants(candidates: int, rank: int, width: int) -> Mapping[str, Any]:
    block_c = max(16, triton.next_power_of_2(candidates))
    return {
        "NUM_CANDIDATES": candidates,
        "RANK": rank,
        "WIDTH": width,
        "BLOCK_F": BLOCK_F,
        "BLOCK_C": block_c,
        "BLOCK_R": min(64, max(16, triton.next_power_of_2(rank))),
        "BLOCK_W": max(2, triton.next_power_of_2(width)),
    }


def aot_cases() -> list[AotCase]:
    """Ranks of Qwen3-8B's correctors, a narrow and a full choice."""
    return [
        _aot_case(dtype, rank, width)
        for dtype, rank, width in (
            ("bf16", 64, 7),
            ("bf16", 256, 64),
            ("fp16", 128, 16),
            ("fp32", 128, 64),
        )
    ]


def _aot_case(dtype: str, rank: int, width: int) -> AotCase:
    strides = ("state_request", "state_node", "rows_request", "rows_candidate",
               "base_request", "rest_request")  # fmt: skip
    inputs = ("state_ptr", "rows_ptr", "base_ptr", "rest_ptr")
    signature = {
        **dict.fromkeys(inputs, f"*{dtype}"),
        "log_q_ptr": "*fp32",
        "best_index_ptr": "*i64",
        "best_log_q_ptr": "*fp32",
        "num_nodes": "i32",
        **{f"{name}_stride": "i32" for name in strides},
    }
    name = f"score_frontier {dtype} R{rank} width{width}"
    return AotCase(name, _score_frontier_kernel, signature, _constants(64, rank, width))
