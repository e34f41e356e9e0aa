"""SGLang's full mask: the vectorised op equals the loops, and rows read as they should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels.reference.pack_tree_mask import pack_tree_mask as reference
from specstack_kernels.testing_candidates import random_masks
from specstack_kernels.torch_ops.pack_tree_mask import pack_tree_mask


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 20), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_equals_the_loops(batch, nodes, longest, seed):
    tree_mask, seq_lens, lens = random_masks(batch, nodes, longest, seed)
    actual = pack_tree_mask(tree_mask, seq_lens, num_tokens=sum(lens))
    expected = reference(tree_mask, seq_lens, num_tokens=sum(lens))
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 20), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_rows_see_the_prefix_and_their_part_of_the_tree(batch, nodes, longest, seed):
    tree_mask, seq_lens, lens = random_masks(batch, nodes, longest, seed)
    full, offsets = pack_tree_mask(tree_mask, seq_lens, num_tokens=sum(lens))
    assert offsets[0] == 0
    assert offsets[-1] == len(full)
    for b, seq_len in enumerate(lens):
        rows = full[offsets[b] : offsets[b + 1]].view(nodes, seq_len + nodes)
        assert rows[:, :seq_len].all()
        assert torch.equal(rows[:, seq_len:], tree_mask[b])


def test_the_definition_refuses_another_number_of_tokens():
    tree_mask, seq_lens, lens = random_masks(2, 3, 5, 0)
    with pytest.raises((AssertionError, IndexError)):
        reference(tree_mask, seq_lens, num_tokens=sum(lens) + 1)
