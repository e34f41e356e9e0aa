"""Vectorised twin of `reference.pack_bits`: a bit of all bytes at a time."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack_kernels.types import PackedBits


def pack_bits(
    full: Bool[Tensor, " T"], offsets: Int[Tensor, " B+1"], *, num_bytes: int
) -> PackedBits:
    """Return the bits of each request. Host sync: none.

    Args:
        offsets: where the flags of each request start, and their end.
        num_bytes: P, which the host knows (`count_mask_bytes`).
    """
    byte_offsets = pad(((offsets.diff() + 7) // 8).cumsum(0), (1, 0))
    byte = torch.arange(num_bytes, device=full.device)
    request = torch.searchsorted(byte_offsets, byte, right=True) - 1  # [P], never an empty one
    place = offsets[request] + 8 * (byte - byte_offsets[request])
    end = offsets[request + 1]
    packed = torch.zeros(num_bytes, dtype=torch.uint8, device=full.device)
    for bit in range(8):
        flags = full.take(place.clamp(max=full.shape[0] - 1)) & (place < end)
        packed |= flags.to(torch.uint8) << bit
        place += 1
    return PackedBits(packed, byte_offsets)
