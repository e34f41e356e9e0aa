"""The Triton bits equal the definition, also where a request takes several blocks and programs."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.pack_bits import pack_bits as reference
from specstack_kernels.triton import pack_bits as module
from specstack_kernels.triton.pack_bits import pack_bits

LENGTHS = [[0], [1], [8], [9, 0, 7], [100, 33, 64, 1, 257], [0, 0, 0], [2050, 2048]]


def random_flags(lens):
    flags = torch.rand(sum(lens), generator=torch.Generator().manual_seed(0)) < 0.5
    return flags, torch.tensor([0, *lens]).cumsum(0), sum(-(-length // 8) for length in lens)


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("lens", LENGTHS, ids=str)
@pytest.mark.parametrize(("block", "programs"), [(256, 1024), (4, 1), (4, 12)])
def test_equals_the_loops(lens, block, programs, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_P", block)
    monkeypatch.setattr(module, "MIN_PROGRAMS", programs)
    flags, offsets, num_bytes = random_flags(lens)
    expected = reference(flags, offsets, num_bytes=num_bytes)
    assert_equal(pack_bits(flags, offsets, num_bytes=num_bytes), expected)


def test_offsets_may_begin_anywhere():
    """What stands before the first request, and behind the last, is not read."""
    flags, offsets, num_bytes = random_flags([11, 20])
    expected = reference(flags, offsets, num_bytes=num_bytes)
    surrounded = torch.cat([torch.ones(5, dtype=torch.bool), flags, torch.ones(9).bool()])
    assert_equal(pack_bits(surrounded, offsets + 5, num_bytes=num_bytes), expected)


def test_a_changed_flag_changes_its_bit():
    flags, offsets, num_bytes = random_flags([11, 20])
    expected = reference(flags, offsets, num_bytes=num_bytes)
    flags[11 + 10] ^= True
    changed = pack_bits(flags, offsets, num_bytes=num_bytes)
    assert (changed.packed ^ expected.packed).tolist() == [0, 0, 0, 4, 0]
