"""The best candidates of a trie: the vectorised op equals the loops, and both what they promise.

Floats are compared exactly: every form adds the same float32 numbers in the same order.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels.reference.best_nodes import best_nodes as reference
from specstack_kernels.testing_candidates import random_trie
from specstack_kernels.torch_ops.best_nodes import best_nodes
from specstack_kernels.torch_ops.ranking import best_columns

SHAPES = [(1, 1, 1, 1), (3, 7, 5, 2), (2, 33, 33, 4), (2, 100, 64, 3), (1, 65, 80, 65)]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "candidates", "drafts", "max_depth"), SHAPES)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_equals_the_loops(batch, candidates, drafts, max_depth, coarse, dead):
    trie = random_trie(batch, candidates, 0, coarse=coarse, dead=dead)
    expected = reference(*trie, drafts, max_depth=max_depth)
    assert_equal(best_nodes(*trie, drafts, max_depth=max_depth), expected)


cases = st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(0, 14), st.integers(1, 6))
seeds = st.integers(0, 10**6)


@given(cases, seeds, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_shape_equals_the_loops(case, seed, coarse, dead):
    batch, candidates, drafts, max_depth = case
    trie = random_trie(batch, candidates, seed, coarse=coarse, dead=dead)
    expected = reference(*trie, drafts, max_depth=max_depth)
    assert_equal(best_nodes(*trie, drafts, max_depth=max_depth), expected)


@given(cases, seeds, st.booleans())
@settings(max_examples=150, deadline=None)
def test_keeps_the_form(case, seed, coarse):
    batch, candidates, drafts, max_depth = case
    parents, log_q = random_trie(batch, candidates, seed, coarse=coarse)
    order, path_log_q, parent_node = best_nodes(parents, log_q, drafts, max_depth=max_depth)
    num_kept = min(drafts, candidates)
    assert order.shape == (batch, num_kept)
    assert (parent_node <= torch.arange(num_kept)).all()
    assert not (path_log_q[:, 1:] > path_log_q[:, :-1]).any()
    assert all(len(set(row)) == num_kept for row in order.tolist())
    is_live = path_log_q > -torch.inf
    assert (parent_node[~is_live] == 0).all()
    # A live draft's parent is among the drafts, and the path goes through it.
    chosen = torch.cat([torch.full((batch, 1), -1), order], dim=1).gather(1, parent_node)
    assert torch.equal(chosen[is_live], parents.gather(1, order)[is_live])
    above = torch.nn.functional.pad(path_log_q, (1, 0)).gather(1, parent_node)
    assert torch.equal((above + log_q.gather(1, order))[is_live], path_log_q[is_live])


@given(st.integers(1, 8), st.integers(0, 8), seeds, st.booleans())
@settings(max_examples=100, deadline=None)
def test_maximises_the_expected_number_of_accepted_drafts(candidates, drafts, seed, coarse):
    trie = random_trie(1, candidates, seed, coarse=coarse)
    paths = {}
    for m in range(candidates):
        if trie.log_q[0, m] > -torch.inf:
            parent = int(trie.parent_index[0, m])
            above, log_q = paths.get(parent, ((), 0.0 if parent < 0 else -torch.inf))
            paths[m] = ((*above, m), log_q + float(trie.log_q[0, m]))
    paths = {m: path for m, path in paths.items() if path[1] > -torch.inf}
    size = min(drafts, len(paths))
    best = max(
        sum(2.718281828459045 ** paths[m][1] for m in chosen)
        for chosen in itertools.combinations(paths, size)
        if all(set(paths[m][0]) <= set(chosen) for m in chosen)
    )
    actual = best_nodes(*trie, drafts, max_depth=candidates).path_log_q
    # 8 float32 probabilities of at most 1, from sums of 8 terms: 64 roundings of 6e-8.
    assert float(actual.exp().sum()) == pytest.approx(best, abs=1e-5)


def test_ties_go_to_the_lower_candidate():
    parents = torch.tensor([[-1, -1, 0, 1]])
    best = best_nodes(parents, torch.zeros(1, 4), 4, max_depth=2)
    assert best.order.tolist() == [[0, 1, 2, 3]]
    assert best.parent_node.tolist() == [[0, 0, 1, 2]]


def test_a_dead_parent_kills_its_children():
    parents, log_q = torch.tensor([[-1, 0, -1]]), torch.tensor([[-torch.inf, 0.0, -1.0]])
    best = best_nodes(parents, log_q, 3, max_depth=2)
    assert best.order.tolist() == [[2, 0, 1]]
    assert best.path_log_q.tolist() == [[-1.0, -torch.inf, -torch.inf]]


@given(st.lists(st.floats(-(2.0**100), 0.0, width=32) | st.just(-torch.inf), max_size=20))
def test_ranking_is_a_stable_sort(values):
    log_q = torch.tensor([values + values[:3]], dtype=torch.float32)
    expected = log_q.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(best_columns(log_q, 30), expected)


def test_ranking_takes_what_is_above_zero_for_zero():
    assert best_columns(torch.tensor([[1e-9, -0.0, 2e-9, 0.0]]), 4).tolist() == [[0, 1, 2, 3]]


def test_ranking_refuses_other_floats():
    with pytest.raises(AssertionError, match=r"log q in torch\.float64"):
        best_columns(torch.zeros((1, 2), dtype=torch.float64), 1)
