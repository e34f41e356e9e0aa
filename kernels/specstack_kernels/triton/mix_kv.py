"""Triton twin of `reference.mix_kv`: one program per head's keys or values and block of tokens."""

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
    check_taps,
    finish,
    head_constants,
    load_halves,
    num_parts,
    num_warps,
    partial_rows,
    rotate,
    row_signature,
    store_halves,
    unrotate,
)


@triton.jit
def _mixed_head(
    taps_ptr, mix_ptr, cos_ptr, sin_ptr, tokens, is_row, layer_head, part, scale,
    token_stride, tap_stride, head_stride,
    DEROTATES: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_TAPS: tl.constexpr,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The part of one head's mix: a step reads BLOCK_C elements of both halves of a tapped head."""
    halves, offsets = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_C)
    width: tl.constexpr = NUM_TAPS * NUM_HEADS * 2 * HALF
    out_low = mix_ptr + (layer_head * (2 * HALF) + halves)[None, :] * width
    out_high = out_low + HALF * width
    low = tl.zeros([BLOCK_T, BLOCK_HALF], dtype=tl.float32)
    high = low
    chunks: tl.constexpr = tl.cdiv(HALF, BLOCK_C)
    steps: tl.constexpr = tl.cdiv(NUM_TAPS * NUM_HEADS * chunks, NUM_PARTS)
    for i in range(steps):
        step = part * steps + i
        source, columns = step // chunks, (step % chunks) * BLOCK_C + offsets
        tap, head = source // NUM_HEADS, source % NUM_HEADS
        heads = taps_ptr + tokens * token_stride + tap * tap_stride + head * head_stride
        is_live = is_row & (tap < NUM_TAPS)
        in_low, in_high = load_halves(heads, columns, is_live, HALF)
        if DEROTATES:
            in_low, in_high = unrotate(
                in_low, in_high, cos_ptr, sin_ptr, tokens, columns, is_live, scale, HALF
            )
        is_weight = (halves < HALF)[None, :] & ((columns < HALF) & (tap < NUM_TAPS))[:, None]
        place = (source * (2 * HALF) + columns)[:, None]
        weight = tl.load(out_low + place, mask=is_weight, other=0.0)
        low = tl.dot(in_low, weight, low, input_precision="ieee")
        weight = tl.load(out_low + HALF + place, mask=is_weight, other=0.0)
        low = tl.dot(in_high, weight, low, input_precision="ieee")
        weight = tl.load(out_high + place, mask=is_weight, other=0.0)
        high = tl.dot(in_low, weight, high, input_precision="ieee")
        weight = tl.load(out_high + HALF + place, mask=is_weight, other=0.0)
        high = tl.dot(in_high, weight, high, input_precision="ieee")
    return low, high


@triton.jit(do_not_specialize=["num_tokens"])
def _mix_kv_kernel(
    keys_ptr,
    values_ptr,
    k_mix_ptr,
    v_mix_ptr,
    cos_ptr,
    sin_ptr,
    kv_slots_ptr,
    is_kept_ptr,
    pool_keys_ptr,
    pool_values_ptr,
    partial_ptr,
    num_tokens,
    token_stride,
    tap_stride,
    tapped_head_stride,
    slot_stride,
    layer_stride,
    head_stride,
    scale,
    IS_DEROTATED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    layer_head, part = tl.program_id(1).to(tl.int64), tl.program_id(2) // 2
    is_row = tl.load(is_kept_ptr + tokens, mask=tokens < num_tokens, other=0) != 0
    if tl.max(is_row.to(tl.int32), axis=0) == 0:
        return  # padding
    halves = tl.arange(0, BLOCK_HALF)
    slots = tl.load(kv_slots_ptr + tokens, mask=is_row, other=0)
    place = slots * slot_stride
    place += (layer_head // NUM_HEADS) * layer_stride + (layer_head % NUM_HEADS) * head_stride
    if tl.program_id(2) % 2 == 0:
        low, high = _mixed_head(
            keys_ptr, k_mix_ptr, cos_ptr, sin_ptr, tokens, is_row, layer_head, part, scale,
            token_stride, tap_stride, tapped_head_stride,
            IS_DEROTATED, NUM_PARTS, NUM_TAPS, NUM_HEADS, HALF, BLOCK_T, BLOCK_HALF, BLOCK_C,
        )  # fmt: skip
        if NUM_PARTS > 1:
            rows = partial_rows(partial_ptr, part, layer_head, tokens, num_tokens, 0, HALF)
            store_halves(low, high, rows, halves, is_row, HALF)
        else:
            low, high = rotate(low, high, cos_ptr, sin_ptr, tokens, halves, is_row, HALF)
            store_halves(low, high, pool_keys_ptr + place, halves, is_row, HALF)
    else:
        low, high = _mixed_head(
            values_ptr, v_mix_ptr, cos_ptr, sin_ptr, tokens, is_row, layer_head, part, scale,
            token_stride, tap_stride, tapped_head_stride,
            False, NUM_PARTS, NUM_TAPS, NUM_HEADS, HALF, BLOCK_T, BLOCK_HALF, BLOCK_C,
        )  # fmt: skip
        if NUM_PARTS > 1:
            rows = partial_rows(partial_ptr, part, layer_head, tokens, num_tokens, 1, HALF)
            store_halves(low, high, rows, halves, is_row, HALF)
        else:
            store_halves(low, high, pool_values_ptr + place, halves, is_row, HALF)


def mix_kv(
    keys: Float[Tensor, "T m G C"],
    values: Float[Tensor, "T m G C"],
    k_mix: Float[Tensor, "n G*C m*G*C"],
    v_mix: Float[Tensor, "n G*C m*G*C"],
    cos: Float[Tensor, "T C"],
    sin: Float[Tensor, "T C"],
    kv_slots: Int[Tensor, " T"],
    is_kept: Bool[Tensor, " T"],
    pool_keys: Float[Tensor, "S n G C"],
    pool_values: Float[Tensor, "S n G C"],
    *,
    is_derotated: bool,
    scale: float = 1.0,
) -> None:
    """Write the rows `kv_slots` of the kept tokens; weights are contiguous. Host sync: none."""
    check_rows(cos, sin, pool_keys, pool_values)
    check_taps(keys, values)
    check_contiguous(k_mix, v_mix)
    num_tokens, taps, heads, head_dim = keys.shape
    if num_tokens == 0:
        return
    layers, itemsize = pool_keys.shape[1], keys.dtype.itemsize
    block_t, block_c = block_tokens(num_tokens, head_dim, itemsize), _block_c(head_dim, itemsize)
    grid = (triton.cdiv(num_tokens, block_t), layers * heads)
    steps = taps * heads * triton.cdiv(head_dim // 2, block_c)
    parts = num_parts(2 * grid[0] * grid[1], steps)
    size = (parts, layers * heads, 2, num_tokens, head_dim) if parts > 1 else (1,)
    partial = torch.empty(size, dtype=torch.float32, device=keys.device)
    rows = (cos, sin, kv_slots, is_kept, pool_keys, pool_values)
    _mix_kv_kernel[(*grid, 2 * parts)](
        keys, values, k_mix, v_mix, *rows, partial,
        num_tokens, *keys.stride()[:3], *pool_keys.stride()[:3], scale,
        **_constants(is_derotated, taps, heads, head_dim, block_t, block_c, parts),
        num_warps=num_warps(block_t, itemsize),
    )  # fmt: skip
    if parts > 1:
        finish(partial, None, None, rows, 0.0, 0)


def _block_c(head_dim: int, itemsize: int) -> int:
    """Elements of a half that a step reads, 16 at least."""
    return max(16, min(64 // itemsize, 1 << (head_dim // 2 - 1).bit_length()))


def _constants(
    is_derotated: bool, taps: int, heads: int, head_dim: int, block_t: int, block_c: int, parts: int
) -> Mapping[str, Any]:
    return {
        "IS_DEROTATED": is_derotated,
        "NUM_PARTS": parts,
        "NUM_TAPS": taps,
        "BLOCK_T": block_t,
        "BLOCK_C": block_c,
        **head_constants(heads, head_dim // 2),
    }


def aot_cases() -> list[AotCase]:
    """Qwen3-8B with five taps, a decoding round in parts and a prefill; heads of other sizes."""
    return [
        _aot_case("bf16", 128, 16, 8, is_derotated=False),
        _aot_case("bf16", 128, 16, 8, is_derotated=True),
        _aot_case("bf16", 128, 64, 1, is_derotated=True),
        _aot_case("fp16", 64, 64, 1, is_derotated=True),
        _aot_case("bf16", 256, 32, 1, is_derotated=True),
        _aot_case("fp32", 128, 16, 1, is_derotated=True),
    ]


def _aot_case(
    dtype: str, head_dim: int, block_t: int, parts: int, *, is_derotated: bool
) -> AotCase:
    inputs = ("keys_ptr", "values_ptr", "k_mix_ptr", "v_mix_ptr")
    signature = {
        **dict.fromkeys(inputs, f"*{dtype}"),
        **row_signature(dtype),
        "partial_ptr": "*fp32",
        **dict.fromkeys(("token_stride", "tap_stride", "tapped_head_stride"), "i32"),
        "scale": "fp32",
    }
    itemsize = 4 if dtype == "fp32" else 2
    block_c = _block_c(head_dim, itemsize)
    constants = _constants(is_derotated, 5, 8, head_dim, block_t, block_c, parts)
    kind = "derotated" if is_derotated else "linear"
    name = f"mix_kv {kind} {dtype} C{head_dim} block{block_t} parts{parts}"
    return AotCase(name, _mix_kv_kernel, signature, constants, num_warps(block_t, itemsize))
