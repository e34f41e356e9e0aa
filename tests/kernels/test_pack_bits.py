"""Flags as bits: the vectorised op equals the loops and numpy's packing of each request."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels.reference.pack_bits import count_mask_bytes
from specstack_kernels.reference.pack_bits import pack_bits as reference
from specstack_kernels.testing_candidates import random_masks
from specstack_kernels.torch_ops.pack_bits import pack_bits
from specstack_kernels.torch_ops.pack_tree_mask import pack_tree_mask

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@given(lengths, st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_equals_the_loops_and_numpy(lens, seed):
    flags = torch.rand(sum(lens), generator=torch.Generator().manual_seed(seed)) < 0.5
    offsets = torch.tensor([0, *lens]).cumsum(0)
    num_bytes = sum(-(-length // 8) for length in lens)
    actual = pack_bits(flags, offsets, num_bytes=num_bytes)
    for a, b in zip(actual, reference(flags, offsets, num_bytes=num_bytes), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for b, part in enumerate(flags.split(lens)):
        packed = actual.packed[actual.byte_offsets[b] : actual.byte_offsets[b + 1]]
        assert packed.tolist() == np.packbits(part.numpy(), bitorder="little").tolist()


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 20), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_the_host_knows_how_many_bytes_a_mask_takes(batch, nodes, longest, seed):
    tree_mask, seq_lens, lens = random_masks(batch, nodes, longest, seed)
    full, offsets = pack_tree_mask(tree_mask, seq_lens, num_tokens=sum(lens))
    num_bytes = count_mask_bytes(lens, nodes)
    assert pack_bits(full, offsets, num_bytes=num_bytes).byte_offsets[-1] == num_bytes


def test_the_first_flag_is_the_lowest_bit_and_the_rest_of_a_byte_is_zero():
    flags = torch.tensor([True, False, True] + 8 * [True])
    packed, byte_offsets = pack_bits(flags, torch.tensor([0, 3, 11]), num_bytes=2)
    assert packed.tolist() == [0b101, 0xFF]
    assert byte_offsets.tolist() == [0, 1, 2]
