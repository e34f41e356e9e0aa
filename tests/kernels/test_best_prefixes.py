"""The most probable prefixes: the vectorised op equals the heap, and the heap equals brute force.

Floats are compared exactly: every form adds the same float32 numbers in the same order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels.reference.best_prefixes import best_prefixes as reference
from specstack_kernels.reference.best_prefixes import count_prefixes
from specstack_kernels.testing_candidates import DEAD_TOKEN, random_marginals
from specstack_kernels.torch_ops.best_prefixes import best_prefixes

SHAPES = [
    (1, 1, 1, 1),
    (1, 5, 8, 8),
    (3, 7, 33, 33),
    (2, 16, 4, 65),
    (4, 8, 128, 128),
    (2, 3, 2, 50),
]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "depths", "width", "drafts"), SHAPES)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_equals_the_heap(batch, depths, width, drafts, coarse, dead):
    marginals = random_marginals(batch, depths, width, 0, coarse=coarse, dead=dead)
    assert_equal(best_prefixes(*marginals, drafts), reference(*marginals, drafts))


shapes = st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 9), st.integers(0, 40))
seeds = st.integers(0, 10**6)


@given(shapes, seeds, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_shape_equals_the_heap(shape, seed, coarse, dead):
    batch, depths, width, drafts = shape
    marginals = random_marginals(batch, depths, width, seed, coarse=coarse, dead=dead)
    assert_equal(best_prefixes(*marginals, drafts), reference(*marginals, drafts))


def all_prefixes(log_q):
    """All live prefixes of a request, as (path log q, tuple of ranks), by the order of the docs."""
    prefixes, above = [], [(np.float32(0), ())]
    for row in log_q.numpy():
        children = [
            (path + row[rank], (*ranks, rank)) for path, ranks in above for rank in range(len(row))
        ]
        # Children are listed by parent, then by rank, and the sort is stable.
        above = sorted((c for c in children if c[0] > -np.inf), key=lambda child: -child[0])
        prefixes += above
    return sorted(prefixes, key=lambda prefix: (-prefix[0], len(prefix[1])))


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 30), seeds, st.booleans())
@settings(max_examples=150, deadline=None)
def test_holds_the_best_of_all_prefixes(depths, width, drafts, seed, coarse):
    marginals = random_marginals(2, depths, width, seed, coarse=coarse)
    actual = best_prefixes(*marginals, drafts)
    for b in range(2):
        expected = all_prefixes(marginals.log_q[b])[:drafts]
        paths = prefixes_of(actual, b)
        assert len(paths) == len(expected)
        for path, (path_log_q, ranks) in zip(paths, expected, strict=True):
            tokens = [int(marginals.tokens[b, depth, rank]) for depth, rank in enumerate(ranks)]
            assert path == (path_log_q, tokens)


def prefixes_of(prefixes, b):
    """The live prefixes of a row as (path log q, tokens)."""
    paths = []
    for s in range(prefixes.tokens.shape[1]):
        if prefixes.path_log_q[b, s] > -torch.inf:
            parent = int(prefixes.parent_index[b, s])
            above = paths[parent][1] if parent >= 0 else []
            paths.append((float(prefixes.path_log_q[b, s]), [*above, int(prefixes.tokens[b, s])]))
    return paths


@given(shapes, seeds, st.booleans())
@settings(max_examples=150, deadline=None)
def test_keeps_the_form(shape, seed, coarse):
    batch, depths, width, drafts = shape
    marginals = random_marginals(batch, depths, width, seed, coarse=coarse)
    prefixes = best_prefixes(*marginals, drafts)
    tokens, parents, log_q, path_log_q = prefixes
    num_kept = count_prefixes(depths, width, drafts)
    assert tokens.shape == (batch, num_kept)
    assert num_kept <= drafts
    assert (parents < torch.arange(num_kept)).all()
    above = torch.nn.functional.pad(path_log_q, (1, 0)).gather(1, parents + 1)
    assert torch.equal(above + log_q, path_log_q)
    assert not (path_log_q[:, 1:] > path_log_q[:, :-1]).any()
    is_dead = path_log_q == -torch.inf
    assert (tokens != DEAD_TOKEN).all()
    assert (tokens[is_dead] == 0).all()
    assert (parents[is_dead] == -1).all()
    for b in range(batch):
        paths = [tuple(path) for _, path in prefixes_of(prefixes, b)]
        assert len(paths) == len(set(paths)) == int((~is_dead[b]).sum())


@pytest.mark.parametrize(
    ("depths", "width", "at_most", "count"),
    [(3, 2, 50, 14), (3, 2, 5, 5), (0, 4, 9, 0), (4, 0, 9, 0), (5, 1, 9, 5), (900, 900, 7, 7)],
)
def test_counts_prefixes(depths, width, at_most, count):
    assert count_prefixes(depths, width, at_most) == count


def test_ties_go_to_the_lower_depth_then_to_the_first_parent_then_to_the_better_rank():
    tokens = torch.tensor([[[1, 2], [3, 4], [5, 6]]])
    chosen = best_prefixes(tokens, torch.zeros(1, 3, 2), 9)
    assert chosen.tokens.tolist() == [[1, 2, 3, 4, 3, 4, 5, 6, 5]]
    assert chosen.parent_index.tolist() == [[-1, -1, 0, 0, 1, 1, 2, 2, 3]]


def test_rounding_never_puts_a_child_above_its_parent():
    """Tiny log q of later depths: the sums round, but monotonically."""
    log_q = torch.tensor([[[-1.0, -1.5]] + 11 * [[-1e-9, -2e-8]]])
    tokens = torch.arange(24).view(1, 12, 2)
    chosen = best_prefixes(tokens, log_q, 40)
    assert_equal(chosen, reference(tokens, log_q, 40))
    assert (chosen.path_log_q[0, 1:12] == -1.0).all()


def test_what_is_never_reached_is_never_read():
    """Ranks and depths beyond the budget."""
    marginals = random_marginals(2, 9, 9, 0, dead=False)
    expected = reference(*marginals, 4)
    marginals.log_q[:, 4:] = torch.nan
    marginals.log_q[:, :, 4:] = torch.nan
    assert_equal(best_prefixes(*marginals, 4), expected)
    marginals.log_q[:, 0] -= 5.0  # while this is seen
    assert not torch.equal(best_prefixes(*marginals, 4).path_log_q, expected.path_log_q)
