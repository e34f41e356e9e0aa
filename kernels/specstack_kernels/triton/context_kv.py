"""Triton twin of `reference.context_kv`: one program per head of a layer and block of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.triton.kv_heads import (
    block_tokens,
    check_contiguous,
    check_rows,
    finish,
    head_constants,
    num_parts,
    num_warps,
    partial_rows,
    row_signature,
    store_halves,
    store_key,
)


@triton.jit(do_not_specialize=["num_tokens"])
def _context_kv_kernel(
    fused_ptr,
    norm_weight_ptr,
    k_weight_ptr,
    v_weight_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    kv_slots_ptr,
    is_kept_ptr,
    pool_keys_ptr,
    pool_values_ptr,
    partial_ptr,
    squares_ptr,
    num_tokens,
    fused_stride,
    slot_stride,
    layer_stride,
    head_stride,
    eps,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    layer_head, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    layer = layer_head // NUM_HEADS
    is_row = tl.load(is_kept_ptr + tokens, mask=tokens < num_tokens, other=0) != 0
    if tl.max(is_row.to(tl.int32), axis=0) == 0:
        return  # padding
    halves, offsets = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_D)
    is_half = (halves < HALF)[None, :]
    low = (layer_head * (2 * HALF) + halves)[None, :] * HIDDEN
    high = low + HALF * HIDDEN
    k_low = tl.zeros([BLOCK_T, BLOCK_HALF], dtype=tl.float32)
    k_high, v_low, v_high = k_low, k_low, k_low
    squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    dtype = k_weight_ptr.dtype.element_ty
    part_length: tl.constexpr = tl.cdiv(tl.cdiv(HIDDEN, BLOCK_D), NUM_PARTS) * BLOCK_D
    for start in range(0, part_length, BLOCK_D):
        dims = part * part_length + start + offsets
        is_dim = dims < HIDDEN
        x = tl.load(
            fused_ptr + tokens[:, None] * fused_stride + dims[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        ).to(tl.float32)
        gain = tl.load(norm_weight_ptr + layer * HIDDEN + dims, mask=is_dim, other=0.0)
        squares += tl.sum(x * x, axis=1)
        # The token's length is one factor of its row: it waits for the last square.
        x = (x * gain.to(tl.float32)[None, :]).to(dtype)
        is_weight = is_half & is_dim[:, None]
        weight = tl.load(k_weight_ptr + low + dims[:, None], mask=is_weight, other=0.0)
        k_low = tl.dot(x, weight, k_low, input_precision="ieee")
        weight = tl.load(k_weight_ptr + high + dims[:, None], mask=is_weight, other=0.0)
        k_high = tl.dot(x, weight, k_high, input_precision="ieee")
        weight = tl.load(v_weight_ptr + low + dims[:, None], mask=is_weight, other=0.0)
        v_low = tl.dot(x, weight, v_low, input_precision="ieee")
        weight = tl.load(v_weight_ptr + high + dims[:, None], mask=is_weight, other=0.0)
        v_high = tl.dot(x, weight, v_high, input_precision="ieee")

    if NUM_PARTS > 1:
        rows = partial_rows(partial_ptr, part, layer_head, tokens, num_tokens, 0, HALF)
        store_halves(k_low, k_high, rows, halves, is_row, HALF)
        rows = partial_rows(partial_ptr, part, layer_head, tokens, num_tokens, 1, HALF)
        store_halves(v_low, v_high, rows, halves, is_row, HALF)
        tl.store(squares_ptr + part * num_tokens + tokens, squares, mask=is_row & (layer_head == 0))
    else:
        slots = tl.load(kv_slots_ptr + tokens, mask=is_row, other=0)
        place = layer * layer_stride + (layer_head % NUM_HEADS) * head_stride
        length = tl.rsqrt(squares / HIDDEN + eps)[:, None]
        heads = pool_values_ptr + slots * slot_stride + place
        store_halves(v_low * length, v_high * length, heads, halves, is_row, HALF)
        heads = pool_keys_ptr + slots * slot_stride + place
        store_key(
            k_low * length, k_high * length, k_norm_ptr + layer * (2 * HALF), cos_ptr, sin_ptr,
            heads, tokens, halves, is_row, eps, HALF, HAS_K_NORM,
        )  # fmt: skip


def context_kv(
    fused: Float[Tensor, "T D"],
    norm_weight: Float[Tensor, "n D"],
    k_weight: Float[Tensor, "n G*C D"],
    v_weight: Float[Tensor, "n G*C D"],
    k_norm_weight: Float[Tensor, "n C"] | None,
    cos: Float[Tensor, "T C"],
    sin: Float[Tensor, "T C"],
    kv_slots: Int[Tensor, " T"],
    is_kept: Bool[Tensor, " T"],
    pool_keys: Float[Tensor, "S n G C"],
    pool_values: Float[Tensor, "S n G C"],
    *,
    eps: float,
) -> None:
    """Write the rows `kv_slots` of the kept tokens. Host sync: none.

    Weights are contiguous. Products are of x * norm_weight before it is divided by its length:
    float16 wants features of the order of one, as `TapFusion` gives them.
    """
    check_rows(cos, sin, pool_keys, pool_values)
    check_contiguous(norm_weight, k_weight, v_weight)
    assert fused.stride(1) == 1
    num_tokens, hidden = fused.shape
    _, layers, heads, head_dim = pool_keys.shape
    if num_tokens == 0:
        return
    itemsize = fused.dtype.itemsize
    block_t, block_d = block_tokens(num_tokens, head_dim, itemsize), _block_d(head_dim, itemsize)
    grid = (triton.cdiv(num_tokens, block_t), layers * heads)
    parts = num_parts(grid[0] * grid[1], triton.cdiv(hidden, block_d))
    size = (parts, layers * heads, 2, num_tokens, head_dim) if parts > 1 else (1,)
    partial = torch.empty(size, dtype=torch.float32, device=fused.device)
    squares = partial.new_empty((parts, num_tokens))
    rows = (cos, sin, kv_slots, is_kept, pool_keys, pool_values)
    _context_kv_kernel[(*grid, parts)](
        fused, norm_weight, k_weight, v_weight,
        norm_weight if k_norm_weight is None else k_norm_weight,
        *rows, partial, squares,
        num_tokens, fused.stride(0), *pool_keys.stride()[:3], eps,
        **_constants(heads, head_dim, hidden, k_norm_weight is not None, block_t, block_d, parts),
        num_warps=num_warps(block_t, itemsize),
    )  # fmt: skip
    if parts > 1:
        finish(partial, squares, k_norm_weight, rows, eps, hidden)


def _block_d(head_dim: int, itemsize: int) -> int:
    return (128 if head_dim <= 128 else 64) // itemsize


def _constants(
    heads: int, head_dim: int, hidden: int, has_k_norm: bool, block_t: int, block_d: int, parts: int
) -> Mapping[str, Any]:
    return {
        "NUM_PARTS": parts,
        "HIDDEN": hidden,
        "HAS_K_NORM": has_k_norm,
        "BLOCK_T": block_t,
        "BLOCK_D": block_d,
        **head_constants(heads, head_dim // 2),
    }


def aot_cases() -> list[AotCase]:
    """Qwen3-8B, a decoding round in parts and a prefill; heads of other sizes."""
    return [
        _aot_case("bf16", 128, 16, 16),
        _aot_case("bf16", 128, 64, 1),
        _aot_case("fp16", 64, 64, 1),
        _aot_case("bf16", 256, 32, 1),
        _aot_case("fp32", 128, 16, 16),
        _aot_case("fp32", 128, 16, 1),
    ]


def _aot_case(dtype: str, head_dim: int, block_t: int, parts: int) -> AotCase:
    inputs = ("fused_ptr", "norm_weight_ptr", "k_weight_ptr", "v_weight_ptr", "k_norm_ptr")
    signature = {
        **dict.fromkeys(inputs, f"*{dtype}"),
        **row_signature(dtype),
        "partial_ptr": "*fp32",
        "squares_ptr": "*fp32",
        "fused_stride": "i32",
        "eps": "fp32",
    }
    itemsize = 4 if dtype == "fp32" else 2
    block_d = _block_d(head_dim, itemsize)
    constants = _constants(8, head_dim, 4096, True, block_t, block_d, parts)
    name = f"context_kv {dtype} C{head_dim} block{block_t} parts{parts}"
    warps = num_warps(block_t, itemsize)
    return AotCase(name, _context_kv_kernel, signature, constants, warps)
