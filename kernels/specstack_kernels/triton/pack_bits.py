"""Triton twin of `reference.pack_bits`: one program per share of a request's bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.types import PackedBits

BLOCK_P = 256
"""Bytes that a program writes at a time."""
MIN_PROGRAMS = 1024
"""Requests are shared out among programs until there are so many, if they are long enough."""


def pack_bits(
    full: Bool[Tensor, " T"], offsets: Int[Tensor, " B+1"], *, num_bytes: int
) -> PackedBits:
    """Return the bits of each request. Host sync: none.

    Args:
        offsets: where the flags of each request start, and their end.
        num_bytes: P, which the host knows (`count_mask_bytes`).
    """
    batch = offsets.shape[0] - 1
    bits = PackedBits(
        torch.empty(num_bytes, dtype=torch.uint8, device=full.device), torch.empty_like(offsets)
    )
    longest = max(triton.cdiv(num_bytes, BLOCK_P), 1)
    shares = min(longest, triton.cdiv(MIN_PROGRAMS, batch))
    _pack_bits_kernel[(batch, shares)](
        full.contiguous(),
        offsets.contiguous(),
        *bits,
        batch,
        shares,
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_P=BLOCK_P,
    )
    return bits


@triton.jit
def _pack_bits_kernel(
    full,
    offsets,
    packed,
    byte_offsets,
    batch,
    shares,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    request, share = tl.program_id(0), tl.program_id(1)
    other = tl.arange(0, BLOCK_B)
    starts = tl.load(offsets + other, mask=other < request, other=0)
    ends = tl.load(offsets + other + 1, mask=other < request, other=0)
    first = tl.sum((ends - starts + 7) // 8, 0)
    start = tl.load(offsets + request)
    end = tl.load(offsets + request + 1)
    num_bytes = (end - start + 7) // 8
    if share == 0:
        tl.store(byte_offsets + request + 1, first + num_bytes)
        if request == 0:
            tl.store(byte_offsets, first)
    bit = tl.arange(0, 8)[None, :]
    for begin in range(share * BLOCK_P, num_bytes, shares * BLOCK_P):
        byte = begin + tl.arange(0, BLOCK_P)
        place = start + byte[:, None] * 8 + bit
        flags = tl.load(full + place, mask=place < end, other=False)
        value = tl.sum(flags.to(tl.int32) << bit, 1)
        tl.store(packed + first + byte, value.to(tl.uint8), mask=byte < num_bytes)


def aot_cases() -> list[AotCase]:
    """Batches up to 256."""
    signature = {
        "full": "*i1",
        "offsets": "*i64",
        "packed": "*u8",
        "byte_offsets": "*i64",
        "batch": "i32",
        "shares": "i32",
    }
    return [
        AotCase(
            f"pack_bits B{block}",
            _pack_bits_kernel,
            signature,
            {"BLOCK_B": block, "BLOCK_P": BLOCK_P},
        )
        for block in (1, 64, 256)
    ]
