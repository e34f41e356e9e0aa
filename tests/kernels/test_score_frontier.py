"""Scores of a frontier: the vectorised op equals the loop; what it means for a node."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels.reference.score_frontier import score_frontier as reference
from specstack_kernels.torch_ops.score_frontier import score_frontier

SIZES = (st.integers(1, 3), st.integers(0, 9), st.integers(1, 70), st.integers(1, 40))


def random_inputs(batch, nodes, candidates, rank, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    rows = normal(batch, candidates, rank) / rank**0.5
    return normal(batch, nodes, rank), rows, 3 * normal(batch, candidates), normal(batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@given(*SIZES, st.integers(1, 80), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_equals_the_definition(dtype, batch, nodes, candidates, rank, width, seed):
    inputs = random_inputs(batch, nodes, candidates, rank, seed, dtype)
    expected, actual = reference(*inputs, width=width), score_frontier(*inputs, width=width)
    # Sums of up to 40 products and 70 weights in float32; bfloat16 inputs are exact in it.
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    assert actual.log_q.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(actual.log_q, expected.log_q, atol=tolerance, rtol=0)
    torch.testing.assert_close(actual.best_log_q, expected.best_log_q, atol=tolerance, rtol=0)
    assert torch.equal(actual.log_q.gather(2, actual.best_index), actual.best_log_q)
    ranked = actual.best_index.sort(dim=2).values
    assert bool((ranked[..., 1:] > ranked[..., :-1]).all())


@given(*SIZES, st.integers(1, 80), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_equal_candidates_come_in_order_of_their_index(batch, nodes, candidates, rank, width, seed):
    # Whole numbers are added without rounding, so that few of them give many ties.
    inputs = [x.round().clamp(-1, 1) for x in random_inputs(batch, nodes, candidates, 4, seed)]
    expected, actual = reference(*inputs, width=width), score_frontier(*inputs, width=width)
    assert torch.equal(actual.best_index, expected.best_index)


def test_the_tie_break_never_swaps_neighbours():
    """A step of float32 at -10.4 against 32,768 candidates."""
    base = torch.full((1, 1 << 15), -1.0)
    base[0, -1] += 2.0**-20
    state, rows = torch.zeros(1, 1, 1), torch.zeros(1, 1 << 15, 1)
    best = score_frontier(state, rows, base, torch.zeros(1), width=2)
    difference = best.log_q[0, 0, -1] - best.log_q[0, 0, 0]
    assert 0 < float(difference) < 2e-6
    assert best.best_index[0, 0].tolist() == [(1 << 15) - 1, 0]


def test_a_state_of_zero_gives_the_law_without_correction():
    """The C best tokens of a whole vocabulary keep their own log-softmax."""
    torch.manual_seed(0)
    logits = torch.randn(2, 100)
    best = logits.topk(8, dim=1)
    rest = logits.scatter(1, best.indices, -torch.inf).logsumexp(dim=1)
    rows = torch.randn(2, 8, 5)
    scored = score_frontier(torch.zeros(2, 1, 5), rows, best.values, rest, width=8)
    expected = logits.log_softmax(dim=1).gather(1, best.indices)
    torch.testing.assert_close(scored.log_q[:, 0], expected)
    corrected = score_frontier(torch.ones(2, 1, 5), rows, best.values, rest, width=8)
    assert not torch.allclose(corrected.log_q[:, 0], expected, atol=0.1)


def test_all_tokens_inside_add_up_to_one():
    state, rows, base, rest = random_inputs(2, 3, 8, 5, 0)
    scored = score_frontier(state, rows, base, torch.full_like(rest, -torch.inf), width=8)
    torch.testing.assert_close(scored.log_q.exp().sum(dim=2), torch.ones(2, 3))
