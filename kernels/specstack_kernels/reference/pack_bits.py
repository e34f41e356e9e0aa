"""Flags as bits, for FlashInfer's packed custom mask: the definition.

Eight flags make a byte, the first in its lowest bit; every request starts on a byte, and the unused
bits of its last one are 0. Letters: B requests, T flags, P bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack_kernels.types import PackedBits


def pack_bits(
    full: Bool[Tensor, " T"], offsets: Int[Tensor, " B+1"], *, num_bytes: int
) -> PackedBits:
    """Return the bits of each request.

    Args:
        offsets: where the flags of each request start, and their end.
        num_bytes: P, which the host knows (`count_mask_bytes`).
    """
    packed = torch.zeros(num_bytes, dtype=torch.uint8)
    byte_offsets = torch.zeros_like(offsets)
    for b in range(len(offsets) - 1):
        start, end = int(offsets[b]), int(offsets[b + 1])
        byte_offsets[b + 1] = byte_offsets[b] + (end - start + 7) // 8
        for i in range(end - start):
            if full[start + i]:
                packed[int(byte_offsets[b]) + i // 8] += 1 << (i % 8)
    assert byte_offsets[-1] == num_bytes, f"{num_bytes} bytes are not what the offsets need"
    return PackedBits(packed, byte_offsets)


def count_mask_bytes(seq_lens: Sequence[int], num_nodes: int) -> int:
    """Bytes of the packed masks of trees of `num_nodes` nodes behind prefixes of `seq_lens`."""
    return sum((num_nodes * (seq_len + num_nodes) + 7) // 8 for seq_len in seq_lens)
