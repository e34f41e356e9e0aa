"""Sampling filters: the vectorised op equals the loop, and both keep what SGLang keeps.

Logits come on a grid of eighths, so that ties are common; probabilities then tie exactly.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels import ops
from specstack_kernels.reference.filter_probs import filter_probs as reference
from specstack_kernels.testing import random_sampling


def random_logits(batch, vocab, seed, *, ties):
    logits = torch.randn((batch, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 8).round() / 8 if ties else logits


@pytest.mark.parametrize("vocab", [1, 2, 5, 100])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("use_top_k_top_p", [False, True])
def test_equals_the_definition(vocab, ties, use_top_k_top_p):
    for seed in range(8):
        logits = random_logits(4, vocab, seed, ties=ties)
        sampling = random_sampling(4, vocab, seed)
        actual = ops.filter_probs(logits, *sampling, use_top_k_top_p=use_top_k_top_p)
        expected = reference(logits, *sampling, use_top_k_top_p=use_top_k_top_p)
        assert torch.equal(actual > 0, expected > 0)
        # One division of float32 sums of at most 100 terms.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@given(
    st.integers(1, 60),
    st.floats(0.2, 2.0),
    st.one_of(st.integers(1, 70), st.just(1 << 30)),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_keeps_what_sglang_keeps(vocab, temperature, top_k, top_p, min_p, seed):
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    logits = random_logits(1, vocab, seed, ties=False)
    sampling = [torch.tensor([x]) for x in (temperature, top_k, top_p, min_p)]
    probs = torch.softmax(logits / temperature, dim=-1)
    _, kept, token_ids, _ = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), *sampling[1:], True, None, torch.zeros(1), return_filtered_probs=True
    )
    theirs = torch.zeros_like(probs).scatter(1, token_ids.long(), kept)
    theirs /= theirs.sum()
    ours = ops.filter_probs(logits, *sampling)
    if top_p < 1.0:
        assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_ties_at_the_cut_keep_as_many_tokens_as_sglang_the_first_ids():
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    for seed in range(50):
        logits = random_logits(1, 40, seed, ties=True)
        sampling = [torch.tensor([x]) for x in (1.0, 7, 0.7, 0.0)]
        probs = torch.softmax(logits, dim=-1)
        _, kept, _, _ = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(), *sampling[1:], False, None, torch.zeros(1), return_filtered_probs=True
        )
        ours = ops.filter_probs(logits, *sampling)
        assert int((ours > 0).sum()) == int((kept > 0).sum())
        smallest = probs[ours > 0].min()
        tied = (probs == smallest)[0].nonzero()[:, 0]
        is_kept = ours[0, tied] > 0
        assert torch.equal(is_kept, is_kept.sort(descending=True).values)


def test_masked_tokens_stay_out():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    for use_top_k_top_p in (False, True):
        probs = ops.filter_probs(
            logits,
            *(torch.tensor([x]) for x in (1.0, 1 << 30, 1.0, 0.0)),
            use_top_k_top_p=use_top_k_top_p,
        )
        assert (probs > 0).tolist() == [[True, False, True, False]]


def test_sorting_changes_no_bit_of_a_request_without_sorting_filters():
    """A seeded request must not depend on its neighbours' settings."""
    logits = random_logits(3, 500, 0, ties=False)
    sampling = [
        torch.tensor([0.7] * 3),
        torch.tensor([1 << 30] * 3),
        torch.tensor([1.0] * 3),
        torch.tensor([0.0, 0.1, 0.3]),
    ]
    plain = ops.filter_probs(logits, *sampling, use_top_k_top_p=False)
    assert torch.equal(plain, ops.filter_probs(logits, *sampling, use_top_k_top_p=True))
