"""Heads of keys and values in two halves, as RoPE pairs them: load, rotate, normalise, store.

For `context_kv`, `mix_kv` and `sum_kv`. A tile holds one half of one head of BLOCK_T tokens. Where
whole heads make too few programs to read weights at full speed, the inner axis of the products is
split; float32 sums of the parts go through memory, and `_finish_kernel` adds and stores them.
Letters: T tokens, D inner axis, G KV heads, C head size, S rows of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specstack_kernels.aot import AotCase

MIN_PROGRAMS = 256
"""Two for each multiprocessor of an H100: enough loads in flight for the memory's bandwidth."""
MIN_STEPS = 4
"""Fewest tiles of a part, so that loads still overlap products."""
STRIDES = ("slot_stride", "layer_stride", "head_stride")
"""Of a pool [S, n, G, C]."""


@triton.jit
def load_halves(heads, halves, is_row, HALF: tl.constexpr):
    """Both halves of a head at `heads` [BLOCK_T] pointers; zero outside."""
    is_inside = is_row[:, None] & (halves < HALF)[None, :]
    low = tl.load(heads[:, None] + halves[None, :], mask=is_inside, other=0.0)
    high = tl.load(heads[:, None] + (HALF + halves)[None, :], mask=is_inside, other=0.0)
    return low, high


@triton.jit
def rotate(low, high, cos_ptr, sin_ptr, tokens, halves, is_row, HALF: tl.constexpr):
    """RoPE in float32; with a negative angle if `sin_ptr` is that of one."""
    places = tokens * (2 * HALF)
    cos_low, cos_high = load_halves(cos_ptr + places, halves, is_row, HALF)
    sin_low, sin_high = load_halves(sin_ptr + places, halves, is_row, HALF)
    low, high = low.to(tl.float32), high.to(tl.float32)
    return low * cos_low - high * sin_low, high * cos_high + low * sin_high


@triton.jit
def unrotate(low, high, cos_ptr, sin_ptr, tokens, halves, is_row, scale, HALF: tl.constexpr):
    """Undo `rotate`, whose cos and sin are `scale` times those of an angle; keeps the dtype."""
    places = tokens * (2 * HALF)
    cos_low, cos_high = load_halves(cos_ptr + places, halves, is_row, HALF)
    sin_low, sin_high = load_halves(sin_ptr + places, halves, is_row, HALF)
    low32, high32, square = low.to(tl.float32), high.to(tl.float32), scale * scale
    first = (low32 * cos_low + high32 * sin_low) / square
    second = (high32 * cos_high - low32 * sin_high) / square
    return first.to(low.dtype), second.to(high.dtype)


@triton.jit
def store_halves(low, high, heads, halves, is_row, HALF: tl.constexpr):
    """Store a head at `heads` [BLOCK_T] pointers in their dtype."""
    is_inside = is_row[:, None] & (halves < HALF)[None, :]
    dtype = heads.dtype.element_ty
    tl.store(heads[:, None] + halves[None, :], low.to(dtype), mask=is_inside)
    tl.store(heads[:, None] + (HALF + halves)[None, :], high.to(dtype), mask=is_inside)


@triton.jit
def store_key(
    low, high, k_norm_ptr, cos_ptr, sin_ptr, heads, tokens, halves, is_row, eps,
    HALF: tl.constexpr, HAS_K_NORM: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate, store; the halves are zero in columns beyond HALF."""
    if HAS_K_NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        length = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        is_half = halves < HALF
        gain_low = tl.load(k_norm_ptr + halves, mask=is_half, other=0.0).to(tl.float32)
        gain_high = tl.load(k_norm_ptr + HALF + halves, mask=is_half, other=0.0).to(tl.float32)
        low, high = low * length * gain_low[None, :], high * length * gain_high[None, :]
    low, high = rotate(low, high, cos_ptr, sin_ptr, tokens, halves, is_row, HALF)
    store_halves(low, high, heads, halves, is_row, HALF)


@triton.jit
def partial_rows(
    partial_ptr, part, layer_head, tokens, num_tokens, SIDE: tl.constexpr, HALF: tl.constexpr
):
    """Where a part's sums for one head's keys (SIDE 0) or values (1) are, [BLOCK_T] pointers."""
    block = (part * tl.num_programs(1) + layer_head) * 2 + SIDE
    return partial_ptr + (block * num_tokens + tokens) * (2 * HALF)


@triton.jit(do_not_specialize=["num_tokens"])
def _finish_kernel(
    partial_ptr,
    squares_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    kv_slots_ptr,
    is_kept_ptr,
    pool_keys_ptr,
    pool_values_ptr,
    num_tokens,
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
):
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    layer_head = tl.program_id(1).to(tl.int64)
    halves = tl.arange(0, BLOCK_HALF)
    is_row = tl.load(is_kept_ptr + tokens, mask=tokens < num_tokens, other=0) != 0
    slots = tl.load(kv_slots_ptr + tokens, mask=is_row, other=0)
    place = (layer_head // NUM_HEADS) * layer_stride + (layer_head % NUM_HEADS) * head_stride
    k_low = tl.zeros([BLOCK_T, BLOCK_HALF], dtype=tl.float32)
    k_high, v_low, v_high = k_low, k_low, k_low
    squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    for part in range(NUM_PARTS):
        rows = partial_rows(partial_ptr, part, layer_head, tokens, num_tokens, 0, HALF)
        low, high = load_halves(rows, halves, is_row, HALF)
        k_low, k_high = k_low + low, k_high + high
        rows = partial_rows(partial_ptr, part, layer_head, tokens, num_tokens, 1, HALF)
        low, high = load_halves(rows, halves, is_row, HALF)
        v_low, v_high = v_low + low, v_high + high
        if HIDDEN > 0:
            squares += tl.load(squares_ptr + part * num_tokens + tokens, mask=is_row, other=0.0)
    if HIDDEN > 0:
        length = tl.rsqrt(squares / HIDDEN + eps)[:, None]
        k_low, k_high = k_low * length, k_high * length
        v_low, v_high = v_low * length, v_high * length
    heads = pool_values_ptr + slots * slot_stride + place
    store_halves(v_low, v_high, heads, halves, is_row, HALF)
    heads = pool_keys_ptr + slots * slot_stride + place
    k_norm_ptr += (layer_head // NUM_HEADS) * (2 * HALF)
    store_key(
        k_low, k_high, k_norm_ptr, cos_ptr, sin_ptr, heads, tokens, halves, is_row, eps,
        HALF, HAS_K_NORM,
    )  # fmt: skip


def finish(
    partial: Tensor,
    squares: Tensor | None,
    k_norm_weight: Tensor | None,
    rows: tuple[Tensor, ...],
    eps: float,
    hidden: int,
) -> None:
    """Add the parts of `partial` [parts, n G, 2, T, C] and store them; `rows` as the kernels take.

    Args:
        squares: [parts, T], sums of the squares of the `hidden` inputs of each token, which are
            normalised by them; None for others, with `hidden` 0.
    """
    parts, layer_heads, _, tokens, head_dim = partial.shape
    pool_keys = rows[-1]
    block_t, half = 16, head_dim // 2
    _finish_kernel[triton.cdiv(tokens, block_t), layer_heads](
        partial,
        partial if squares is None else squares,
        partial if k_norm_weight is None else k_norm_weight,
        *rows,
        tokens,
        *pool_keys.stride()[:3],
        eps,
        NUM_PARTS=parts,
        HIDDEN=hidden,
        HAS_K_NORM=k_norm_weight is not None,
        BLOCK_T=block_t,
        **head_constants(pool_keys.shape[2], half),
    )


def head_constants(num_heads: int, half: int) -> Mapping[str, Any]:
    """What all kernels are told of the heads."""
    block_half = max(16, triton.next_power_of_2(half))
    return {"NUM_HEADS": num_heads, "HALF": half, "BLOCK_HALF": block_half}


def block_tokens(num_tokens: int, width: int, itemsize: int) -> int:
    """Tokens of a program: 16 rows of a matrix instruction, or more where registers allow.

    Args:
        width: of what a program holds of each token, in heads' elements.
    """
    most = 8192 // triton.next_power_of_2(max(width, 128)) if itemsize == 2 else 16
    return max(16, min(most, 1 << (num_tokens - 1).bit_length()))


def num_warps(block_t: int, itemsize: int) -> int:
    """Warps that hold the sums of a program's tokens; float32 products take more registers."""
    return 4 if block_t <= 16 and itemsize == 2 else 8


def num_parts(num_programs: int, num_steps: int) -> int:
    """Parts of an inner axis of `num_steps` tiles, a power of two: few variants are compiled."""
    parts = 1
    while parts * num_programs < MIN_PROGRAMS and num_steps >= 2 * parts * MIN_STEPS:
        parts *= 2
    return parts


def check_rows(cos: Tensor, sin: Tensor, pool_keys: Tensor, pool_values: Tensor) -> None:
    """Views that the kernels do not address are our own mistakes."""
    assert pool_keys.stride() == pool_values.stride()
    assert pool_keys.stride(3) == 1
    check_contiguous(cos, sin)


def check_taps(keys: Tensor, values: Tensor) -> None:
    """Likewise for the target's KV."""
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1


def check_contiguous(*tensors: Tensor) -> None:
    """Likewise for angles and weights."""
    assert all(tensor.is_contiguous() for tensor in tensors)


def row_signature(dtype: str) -> Mapping[str, str]:
    """Types of what all kernels take of angles and pool."""
    return {
        "cos_ptr": "*fp32",
        "sin_ptr": "*fp32",
        "kv_slots_ptr": "*i64",
        "is_kept_ptr": "*i1",
        "pool_keys_ptr": f"*{dtype}",
        "pool_values_ptr": f"*{dtype}",
        "num_tokens": "i32",
        **dict.fromkeys(STRIDES, "i32"),
    }


def aot_cases() -> list[AotCase]:
    """Qwen3-8B's heads."""
    signature = {
        "partial_ptr": "*fp32",
        "squares_ptr": "*fp32",
        "k_norm_ptr": "*bf16",
        **row_signature("bf16"),
        "eps": "fp32",
    }
    constants = {"NUM_PARTS": 16, "HIDDEN": 4096, "HAS_K_NORM": True, "BLOCK_T": 16}
    constants = {**constants, **head_constants(8, 64)}
    return [AotCase("kv_heads finish bf16 C128 parts16", _finish_kernel, signature, constants)]
