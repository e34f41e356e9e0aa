"""The Triton mask equals the definition, also where rows take several blocks and programs."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.pack_tree_mask import pack_tree_mask as reference
from specstack_kernels.testing_candidates import random_masks
from specstack_kernels.triton import pack_tree_mask as module
from specstack_kernels.triton.pack_tree_mask import pack_tree_mask

SHAPES = [(1, 1, 0), (1, 1, 7), (3, 5, 40), (2, 16, 33), (5, 3, 129), (2, 33, 64)]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "longest"), SHAPES)
@pytest.mark.parametrize(("block", "programs"), [(2048, 1024), (16, 1), (16, 12)])
def test_equals_the_loops(batch, nodes, longest, block, programs, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_T", block)
    monkeypatch.setattr(module, "MIN_PROGRAMS", programs)
    tree_mask, seq_lens, lens = random_masks(batch, nodes, longest, nodes)
    expected = reference(tree_mask, seq_lens, num_tokens=sum(lens))
    assert_equal(pack_tree_mask(tree_mask, seq_lens, num_tokens=sum(lens)), expected)


def test_rows_beyond_a_block():
    tree_mask, seq_lens = random_masks(2, 3, 0, 0)[:2]
    seq_lens[:] = torch.tensor([2046, 4095])
    expected = reference(tree_mask, seq_lens, num_tokens=6141)
    assert_equal(pack_tree_mask(tree_mask, seq_lens, num_tokens=6141), expected)


def test_lengths_may_be_int32():
    tree_mask, seq_lens, lens = random_masks(3, 4, 9, 1)
    expected = reference(tree_mask, seq_lens, num_tokens=sum(lens))
    assert_equal(pack_tree_mask(tree_mask, seq_lens.int(), num_tokens=sum(lens)), expected)


def test_strided_masks():
    tree_mask, seq_lens, lens = random_masks(2, 6, 9, 1)
    transposed = tree_mask.mT
    expected = reference(transposed.contiguous(), seq_lens, num_tokens=sum(lens))
    assert_equal(pack_tree_mask(transposed, seq_lens, num_tokens=sum(lens)), expected)


def test_a_changed_flag_changes_the_mask():
    tree_mask, seq_lens, lens = random_masks(2, 6, 9, 1)
    expected = reference(tree_mask, seq_lens, num_tokens=sum(lens))
    tree_mask[1, 5, 5] ^= True
    changed = pack_tree_mask(tree_mask, seq_lens, num_tokens=sum(lens))
    assert (changed.full != expected.full).nonzero().tolist() == [[len(changed.full) - 1]]
