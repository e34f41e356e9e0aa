"""The most probable tokens: the vectorised op equals the loop, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels.reference.top_tokens import top_tokens as reference
from specstack_kernels.torch_ops.top_tokens import CHUNK, top_tokens

SHAPES = [(1, 1, 1), (3, 7, 7), (2, CHUNK, 3), (3, 4 * CHUNK + 1, 4), (2, 1000, 5), (2, 1000, 400)]
"""(R, V, k): one token, all of them, no chunk to spare, a rest, chunks, more than chunks."""
IDS = ["R{}-V{}-k{}".format(*shape) for shape in SHAPES]


def random_logits(rows, vocab, seed, *, ties=False):
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if ties else logits


def assert_same(actual, expected):
    assert actual.tokens.dtype == expected.tokens.dtype == torch.int64
    assert torch.equal(actual.tokens, expected.tokens)
    assert actual.log_probs.dtype == torch.float32
    # A sum of exponentials in float32, its logarithm, and a difference, each about 30 at most.
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize(("rows", "vocab", "k"), SHAPES, ids=IDS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition(rows, vocab, k, ties, dtype):
    for seed in range(3):
        logits = random_logits(rows, vocab, seed, ties=ties).to(dtype)
        assert_same(top_tokens(logits, k), reference(logits, k))


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_ties_go_to_the_lowest_token(vocab, k, seed):
    """Three values, zeros of either sign, masked tokens: mostly ties."""
    k = min(k, vocab)
    logits = random_logits(2, vocab, seed).clamp(-1, 1).round()
    logits[:, 1::3] *= -1
    logits[:, 2::5] = -torch.inf
    logits[:, 0] = 0.0
    assert_same(top_tokens(logits, k), reference(logits, k))


def test_columns_have_ids():
    logits = random_logits(3, 200, 0)
    token_ids = torch.arange(200) * 3 + 1
    found = top_tokens(logits, 6, token_ids=token_ids)
    assert_same(found, reference(logits, 6, token_ids=token_ids))
    assert torch.equal(found.tokens, top_tokens(logits, 6).tokens * 3 + 1)


def test_rows_of_a_larger_tensor():
    logits = random_logits(6, 300, 0).view(3, 2, 300)[:, 1, :200]
    assert_same(top_tokens(logits, 2), reference(logits, 2))


def test_no_rows():
    assert top_tokens(torch.zeros(0, 200), 2).tokens.shape == (0, 2)


def test_more_than_all_is_refused():
    with pytest.raises(AssertionError, match="the 8 best of 7"):
        top_tokens(torch.zeros(1, 7), 8)


def test_another_best_token_is_noticed():
    """Control."""
    logits = random_logits(2, 1000, 0)
    expected = reference(logits, 5)
    logits[0, 999] = 50.0
    with pytest.raises(AssertionError):
        assert_same(top_tokens(logits, 5), expected)
