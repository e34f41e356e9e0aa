"""Scores of a frontier: the Triton kernel equals the loop, ties included."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.score_frontier import score_frontier as reference
from specstack_kernels.triton.score_frontier import MAX_CANDIDATES, score_frontier

SHAPES = [(1, 1, 64, 64), (2, 17, 5, 12), (3, 16, 64, 130), (1, 3, 1, 1), (2, 33, 40, 80)]
"""(B, F, C, R): the root, one past a block, odd sizes, a lone candidate."""
IDS = ["B{}-F{}-C{}-R{}".format(*shape) for shape in SHAPES]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_inputs(batch, nodes, candidates, rank, dtype=torch.float32):
    """Views like the drafter's: one depth of several, the others NaN."""
    torch.manual_seed(batch + nodes + candidates + rank)
    rows = torch.full((batch, 3, candidates, rank), torch.nan, dtype=dtype)
    base = torch.full((batch, 3, candidates), torch.nan, dtype=dtype)
    rest = torch.full((batch, 3), torch.nan, dtype=dtype)
    rows[:, 1] = torch.randn(batch, candidates, rank) / rank**0.5
    base[:, 1] = 3 * torch.randn(batch, candidates)
    rest[:, 1] = torch.randn(batch)
    state = torch.full((batch, nodes + 2, rank), torch.nan, dtype=dtype)
    state[:, :nodes] = torch.randn(batch, nodes, rank)
    return state[:, :nodes], rows[:, 1], base[:, 1], rest[:, 1]


def tie_inputs(batch, nodes, candidates, rank):
    """Whole numbers, few of them: equal sums are equal in every order of addition."""
    torch.manual_seed(0)
    rows = torch.randint(-1, 2, (batch, candidates, rank)).float()
    state = torch.randint(-1, 2, (batch, nodes, rank)).float()
    base = torch.randint(-1, 2, (batch, candidates)).float()
    return state, rows, base, torch.zeros(batch)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition(shape, dtype):
    inputs = random_inputs(*shape, dtype)
    expected, actual = reference(*inputs, width=8), score_frontier(*inputs, width=8)
    # Products of 16-bit numbers are exact in float32; 130 of them and a logsumexp are added there:
    # 2^-24 * (130 + 64) * 6, the largest partial sum, at most; the sum of roundings is far less.
    torch.testing.assert_close(actual.log_q, expected.log_q, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(actual.best_log_q, expected.best_log_q, atol=2e-5, rtol=1e-6)
    assert actual.best_index.dtype == torch.int64
    assert torch.equal(actual.log_q.gather(2, actual.best_index), actual.best_log_q)
    assert torch.equal(actual.best_log_q.sort(dim=2, descending=True).values, actual.best_log_q)
    for node in actual.best_index.flatten(0, 1).tolist():
        assert len(set(node)) == len(node)


@pytest.mark.parametrize("width", [1, 3, 16, 40, 99])
def test_equal_candidates_come_in_order_of_their_index(width):
    inputs = tie_inputs(2, 17, 40, 4)
    expected, actual = reference(*inputs, width=width), score_frontier(*inputs, width=width)
    assert torch.equal(actual.best_index, expected.best_index)
    # Nothing would be shown if there were no ties.
    pairs = expected.best_log_q[..., 1:] == expected.best_log_q[..., :-1]
    assert width == 1 or bool(pairs.any())


def test_no_tokens_outside_leaves_a_softmax():
    state, rows, base, rest = random_inputs(2, 5, 7, 9)
    actual = score_frontier(state, rows, base, torch.full_like(rest, -torch.inf), width=7)
    torch.testing.assert_close(actual.log_q.exp().sum(dim=2), torch.ones(2, 5))
    lump = score_frontier(state, rows, base, rest + 3, width=7).log_q.exp().sum(dim=2)
    assert bool((lump < 0.999).all())


def test_every_input_counts():
    inputs = random_inputs(1, 4, 6, 20)
    before = score_frontier(*inputs, width=6)
    for changed in range(4):
        others = [x.clone() for x in inputs]
        others[changed].flatten()[-1] += 0.5
        after = score_frontier(*others, width=6)
        assert not torch.allclose(after.log_q, before.log_q, atol=1e-3)


def test_no_nodes():
    inputs = random_inputs(2, 1, 6, 20)
    empty = score_frontier(inputs[0][:, :0], *inputs[1:], width=3)
    assert empty.log_q.shape == (2, 0, 6)
    assert empty.best_index.shape == empty.best_log_q.shape == (2, 0, 3)


def test_more_candidates_than_a_program_holds_are_scored_all_the_same():
    inputs = random_inputs(1, 2, MAX_CANDIDATES + 1, 16)
    expected, actual = reference(*inputs, width=4), score_frontier(*inputs, width=4)
    torch.testing.assert_close(actual.best_log_q, expected.best_log_q, atol=2e-5, rtol=2e-5)
    assert torch.equal(actual.best_index, expected.best_index)
