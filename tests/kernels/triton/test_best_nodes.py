"""The Triton ranking equals the definition; exactly, as both add the same float32 in order.

Parents of slots without a candidate are poison: they point behind the slot.
"""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.best_nodes import best_nodes as reference
from specstack_kernels.testing_candidates import random_trie
from specstack_kernels.triton.best_nodes import MAX_CANDIDATES, best_nodes

SHAPES = [
    (1, 1, 1, 1),
    (2, 0, 4, 2),
    (2, 5, 0, 2),
    (3, 7, 5, 2),
    (2, 33, 33, 4),
    (3, 64, 70, 9),
    (1, 300, 129, 5),
    (1, 65, 65, 70),
]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "candidates", "drafts", "max_depth"), SHAPES)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_equals_the_loops(batch, candidates, drafts, max_depth, coarse, dead):
    trie = random_trie(batch, candidates, drafts, coarse=coarse, dead=dead)
    expected = reference(*trie, drafts, max_depth=max_depth)
    assert_equal(best_nodes(*trie, drafts, max_depth=max_depth), expected)


def test_many_candidates():
    trie = random_trie(1, 2049, 0)
    expected = reference(*trie, 256, max_depth=8)
    assert_equal(best_nodes(*trie, 256, max_depth=8), expected)


def test_no_candidate_anywhere():
    trie = random_trie(2, 6, 0)
    trie.log_q.fill_(-torch.inf)
    assert_equal(best_nodes(*trie, 4, max_depth=3), reference(*trie, 4, max_depth=3))


def test_strided_inputs():
    parents, log_q = random_trie(4, 12, 0)
    expected = reference(parents[::2].contiguous(), log_q[::2].contiguous(), 7, max_depth=4)
    assert_equal(best_nodes(parents[::2], log_q[::2], 7, max_depth=4), expected)


def test_what_rounding_lifted_above_zero_counts_as_zero():
    parents, log_q = torch.tensor([[-1, 0, -1]]), torch.tensor([[1e-9, 1e-8, -0.0]])
    best = best_nodes(parents, log_q, 3, max_depth=2)
    assert best.order.tolist() == [[0, 1, 2]]
    assert best.parent_node.tolist() == [[0, 1, 0]]


def test_a_changed_depth_changes_the_nodes():
    trie = random_trie(2, 40, 0, dead=False)
    expected = reference(*trie, 20, max_depth=3)
    changed = best_nodes(*trie, 20, max_depth=2)
    assert not torch.equal(changed.order, expected.order)
    assert not torch.equal(changed.parent_node, expected.parent_node)


def test_more_candidates_than_a_program_holds_are_ranked_all_the_same():
    parents, log_q = random_trie(1, MAX_CANDIDATES + 1, 0)
    expected = reference(parents, log_q, 9, max_depth=3)
    assert_equal(best_nodes(parents, log_q, 9, max_depth=3), expected)
