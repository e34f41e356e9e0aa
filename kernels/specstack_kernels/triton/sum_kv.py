"""Triton twin of `reference.sum_kv`: one program per layer's keys or values and block of tokens.

Diagonal maps have a program for every head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.triton.kv_heads import (
    block_tokens,
    check_contiguous,
    check_rows,
    check_taps,
    head_constants,
    load_halves,
    num_warps,
    rotate,
    row_signature,
    store_halves,
    unrotate,
)


@triton.jit
def _narrowed(
    taps, down_ptr, cos_ptr, sin_ptr, tokens, is_row, head_stride, scale,
    ROTATES: tl.constexpr, RANK: tl.constexpr, NUM_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """down @ the unrotated KV of a layer, [BLOCK_T, BLOCK_R]."""
    ranks, offsets = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    width: tl.constexpr = NUM_HEADS * 2 * HALF
    chunks: tl.constexpr = tl.cdiv(HALF, BLOCK_C)
    narrow = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for step in range(NUM_HEADS * chunks):
        head, columns = step // chunks, (step % chunks) * BLOCK_C + offsets
        low, high = load_halves(taps + head * head_stride, columns, is_row, HALF)
        if ROTATES:
            low, high = unrotate(low, high, cos_ptr, sin_ptr, tokens, columns, is_row, scale, HALF)
        is_weight = (ranks < RANK)[None, :] & (columns < HALF)[:, None]
        place = ranks[None, :] * width + (head * (2 * HALF) + columns)[:, None]
        weight = tl.load(down_ptr + place, mask=is_weight, other=0.0)
        narrow = tl.dot(low, weight, narrow, input_precision="ieee")
        weight = tl.load(down_ptr + HALF + place, mask=is_weight, other=0.0)
        narrow = tl.dot(high, weight, narrow, input_precision="ieee")
    return narrow


@triton.jit
def _add_side(
    taps_ptr, down_ptr, up_ptr, cos_ptr, sin_ptr, pool_ptr, tokens, slots, is_row, layer, scale,
    token_stride, tap_stride, tapped_head_stride, slot_stride, layer_stride, head_stride,
    ROTATES: tl.constexpr, RANK: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    halves, ranks = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_R)
    is_half = halves < HALF
    width: tl.constexpr = NUM_HEADS * 2 * HALF
    taps = taps_ptr + tokens * token_stride + layer * tap_stride
    if RANK > 0:
        down_ptr += layer * width * RANK
        narrow = _narrowed(
            taps, down_ptr, cos_ptr, sin_ptr, tokens, is_row, tapped_head_stride, scale,
            ROTATES, RANK, NUM_HEADS, HALF, BLOCK_T, BLOCK_C, BLOCK_R,
        ).to(taps_ptr.dtype.element_ty)  # fmt: skip
    for i in tl.range(HEADS_PER_PROGRAM, num_stages=1):  # `up` of a large rank fills the memory
        head = tl.program_id(2) // 2 * HEADS_PER_PROGRAM + i
        first = layer * width + head * (2 * HALF)  # output of the map
        if RANK > 0:
            is_weight = (ranks < RANK)[:, None] & is_half[None, :]
            place = (first + halves)[None, :] * RANK + ranks[:, None]
            weight = tl.load(up_ptr + place, mask=is_weight, other=0.0)
            low = tl.dot(narrow, weight, input_precision="ieee")
            weight = tl.load(up_ptr + HALF * RANK + place, mask=is_weight, other=0.0)
            high = tl.dot(narrow, weight, input_precision="ieee")
        else:
            low, high = load_halves(taps + head * tapped_head_stride, halves, is_row, HALF)
            if ROTATES:
                low, high = unrotate(
                    low, high, cos_ptr, sin_ptr, tokens, halves, is_row, scale, HALF
                )
            factor = tl.load(up_ptr + first + halves, mask=is_half, other=0.0).to(tl.float32)
            low = low.to(tl.float32) * factor[None, :]
            factor = tl.load(up_ptr + first + HALF + halves, mask=is_half, other=0.0)
            high = high.to(tl.float32) * factor.to(tl.float32)[None, :]
        if ROTATES:
            low, high = rotate(low, high, cos_ptr, sin_ptr, tokens, halves, is_row, HALF)
        heads = pool_ptr + slots * slot_stride + layer * layer_stride + head * head_stride
        own_low, own_high = load_halves(heads, halves, is_row, HALF)
        low, high = own_low.to(tl.float32) + low, own_high.to(tl.float32) + high
        store_halves(low, high, heads, halves, is_row, HALF)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kv_kernel(
    keys_ptr,
    values_ptr,
    k_down_ptr,
    v_down_ptr,
    k_up_ptr,
    v_up_ptr,
    cos_ptr,
    sin_ptr,
    kv_slots_ptr,
    is_kept_ptr,
    pool_keys_ptr,
    pool_values_ptr,
    num_tokens,
    token_stride,
    tap_stride,
    tapped_head_stride,
    slot_stride,
    layer_stride,
    head_stride,
    scale,
    RANK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    is_row = tl.load(is_kept_ptr + tokens, mask=tokens < num_tokens, other=0) != 0
    if tl.max(is_row.to(tl.int32), axis=0) == 0:
        return  # padding
    slots = tl.load(kv_slots_ptr + tokens, mask=is_row, other=0)
    if tl.program_id(2) % 2 == 0:
        _add_side(
            keys_ptr, k_down_ptr, k_up_ptr, cos_ptr, sin_ptr, pool_keys_ptr, tokens, slots, is_row,
            layer, scale, token_stride, tap_stride, tapped_head_stride, slot_stride, layer_stride,
            head_stride, True, RANK, NUM_HEADS, HEADS_PER_PROGRAM, HALF, BLOCK_T, BLOCK_HALF,
            BLOCK_C, BLOCK_R,
        )  # fmt: skip
    else:
        _add_side(
            values_ptr, v_down_ptr, v_up_ptr, cos_ptr, sin_ptr, pool_values_ptr, tokens, slots,
            is_row, layer, scale, token_stride, tap_stride, tapped_head_stride, slot_stride,
            layer_stride, head_stride, False, RANK, NUM_HEADS, HEADS_PER_PROGRAM, HALF, BLOCK_T,
            BLOCK_HALF, BLOCK_C, BLOCK_R,
        )  # fmt: skip


def sum_kv(
    keys: Float[Tensor, "T n G C"],
    values: Float[Tensor, "T n G C"],
    k_down: Float[Tensor, "n R G*C"] | None,
    v_down: Float[Tensor, "n R G*C"] | None,
    k_up: Float[Tensor, "n G*C R"] | Float[Tensor, "n G*C"],
    v_up: Float[Tensor, "n G*C R"] | Float[Tensor, "n G*C"],
    cos: Float[Tensor, "T C"],
    sin: Float[Tensor, "T C"],
    kv_slots: Int[Tensor, " T"],
    is_kept: Bool[Tensor, " T"],
    pool_keys: Float[Tensor, "S n G C"],
    pool_values: Float[Tensor, "S n G C"],
    *,
    scale: float = 1.0,
) -> None:
    """Add to the rows `kv_slots` of the kept tokens; maps are contiguous. Host sync: none."""
    check_rows(cos, sin, pool_keys, pool_values)
    check_taps(keys, values)
    downs = (k_up, v_up) if k_down is None or v_down is None else (k_down, v_down)
    check_contiguous(k_up, v_up, *downs)
    num_tokens, layers, heads, head_dim = keys.shape
    if num_tokens == 0:
        return
    rank = 0 if k_down is None else k_down.shape[1]
    constants = _constants(rank, heads, head_dim, num_tokens, keys.dtype.itemsize)
    groups = heads // constants["HEADS_PER_PROGRAM"]
    _sum_kv_kernel[triton.cdiv(num_tokens, constants["BLOCK_T"]), layers, 2 * groups](
        keys, values,
        *downs,
        k_up, v_up, cos, sin, kv_slots, is_kept, pool_keys, pool_values,
        num_tokens, *keys.stride()[:3], *pool_keys.stride()[:3], scale,
        **constants,
        num_warps=_warps(constants, keys.dtype.itemsize),
    )  # fmt: skip


def _constants(
    rank: int, heads: int, head_dim: int, num_tokens: int, itemsize: int
) -> Mapping[str, Any]:
    block_r = max(16, triton.next_power_of_2(rank))
    return {
        "RANK": rank,
        "HEADS_PER_PROGRAM": heads if rank else 1,
        "BLOCK_T": block_tokens(num_tokens, max(head_dim, 4 * rank), itemsize),
        "BLOCK_C": max(16, min(64 // itemsize, triton.next_power_of_2(head_dim // 2))),
        "BLOCK_R": block_r,
        **head_constants(heads, head_dim // 2),
    }


def _warps(constants: Mapping[str, Any], itemsize: int) -> int:
    # Two tiles of `up` pass through registers.
    return 8 if constants["BLOCK_R"] > 128 else num_warps(constants["BLOCK_T"], itemsize)


def aot_cases() -> list[AotCase]:
    """Qwen3-8B: diagonal and low rank, a decoding round and a prefill; heads of other sizes."""
    return [
        _aot_case("bf16", 128, 0, 16),
        _aot_case("bf16", 128, 0, 4096),
        _aot_case("bf16", 128, 64, 16),
        _aot_case("bf16", 128, 64, 4096),
        _aot_case("bf16", 128, 256, 4096),
        _aot_case("fp16", 64, 32, 4096),
        _aot_case("fp32", 128, 64, 4096),
    ]


def _aot_case(dtype: str, head_dim: int, rank: int, num_tokens: int) -> AotCase:
    inputs = ("keys_ptr", "values_ptr", "k_down_ptr", "v_down_ptr", "k_up_ptr", "v_up_ptr")
    signature = {
        **dict.fromkeys(inputs, f"*{dtype}"),
        **row_signature(dtype),
        **dict.fromkeys(("token_stride", "tap_stride", "tapped_head_stride"), "i32"),
        "scale": "fp32",
    }
    itemsize = 4 if dtype == "fp32" else 2
    constants = _constants(rank, 8, head_dim, num_tokens, itemsize)
    name = f"sum_kv {dtype} C{head_dim} rank{rank} block{constants['BLOCK_T']}"
    return AotCase(name, _sum_kv_kernel, signature, constants, _warps(constants, itemsize))
