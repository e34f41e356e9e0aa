"""Sampling filters in Triton: the same tokens survive as in the definition, away from borders.

A border is where a token's `mass before` equals top_p, or its probability min_p times the largest:
float32 sums decide there. Seeds are fixed, so that no case here stands on one by accident. Logits
on a grid of eighths tie exactly.
"""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.filter_probs import filter_probs as reference
from specstack_kernels.testing import random_sampling
from specstack_kernels.triton import filter_probs as module
from specstack_kernels.triton.filter_probs import MAX_BLOCK, filter_probs

ALL = 1 << 30


def random_logits(batch, vocab, seed, *, ties=False, scale=3.0):
    logits = torch.randn((batch, vocab), generator=torch.Generator().manual_seed(seed)) * scale
    return (logits * 8).round() / 8 if ties else logits


def settings(batch, *, temperature=1.0, top_k=ALL, top_p=1.0, min_p=0.0):
    return [torch.tensor([value] * batch) for value in (temperature, top_k, top_p, min_p)]


def assert_same(actual, expected):
    assert actual.dtype == torch.float32
    assert torch.equal(actual > 0, expected > 0)
    # A probability is exp(x), |x| <= 50 here; x is rounded twice on either side, each time by
    # 2^-24 |x|, which moves the probability by up to 4 * 50 * 2^-24 = 1.2e-5 of itself.
    torch.testing.assert_close(actual, expected, rtol=1.5e-5, atol=1e-7)


@pytest.mark.parametrize("vocab", [1, 2, 5, 100, 257])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("use_top_k_top_p", [False, True])
def test_equals_the_definition(vocab, ties, use_top_k_top_p):
    for seed in range(4):
        logits = random_logits(3, vocab, seed, ties=ties)
        sampling = random_sampling(3, vocab, seed)
        actual = filter_probs(logits, *sampling, use_top_k_top_p=use_top_k_top_p)
        assert_same(actual, reference(logits, *sampling, use_top_k_top_p=use_top_k_top_p))


@pytest.mark.parametrize("ties", [False, True])
def test_rows_of_many_blocks(ties, monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCK", 16)
    for seed in range(4):
        logits = random_logits(3, 100, seed, ties=ties)
        sampling = random_sampling(3, 100, seed)
        assert_same(filter_probs(logits, *sampling), reference(logits, *sampling))


@pytest.mark.parametrize("ties", [False, True])
def test_rows_of_more_than_a_block(ties):
    vocab = MAX_BLOCK + 1
    logits = random_logits(4, vocab, 0, ties=ties)
    logits[0, -1] = 12.0  # the best token stands alone in its block
    sampling = [
        torch.tensor([1.0, 0.7, 1.3, 1.0]),
        torch.tensor([50, ALL, 3000, ALL]),
        torch.tensor([1.0, 0.9, 0.99, 0.5]),
        torch.tensor([0.0, 0.0, 0.001, 0.05]),
    ]
    assert_same(filter_probs(logits, *sampling), reference(logits, *sampling))


@pytest.mark.parametrize(
    ("top_k", "top_p", "num_kept"),
    [(3, 1.0, 3), (ALL, 0.455, 46), (40, 0.455, 40), (ALL, 1.0, 100), (1, 0.005, 1)],
)
def test_ties_are_cut_by_token_id(top_k, top_p, num_kept):
    """A hundred equal tokens: before the 46th there is a mass of 0.45, before the 47th 0.46."""
    sampling = settings(1, top_k=top_k, top_p=top_p)
    probs = filter_probs(torch.full((1, 100), 2.5), *sampling)
    assert (probs[0] > 0).tolist() == [True] * num_kept + [False] * (100 - num_kept)


@pytest.mark.parametrize("min_p", [1.0, 0.999])
def test_the_largest_survive_every_min_p(min_p):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0]])
    probs = filter_probs(logits, *settings(1, min_p=min_p))
    torch.testing.assert_close(probs, torch.tensor([[0, 1, 0, 1, 1]]) / 3)
    probs = filter_probs(logits, *settings(1, min_p=min_p, top_k=2))
    torch.testing.assert_close(probs, torch.tensor([[0, 1, 0, 1, 0]]) / 2)
    probs = filter_probs(logits, *settings(1, min_p=min_p, top_p=0.2))
    torch.testing.assert_close(probs, torch.tensor([[0.0, 1, 0, 0, 0]]))


@pytest.mark.parametrize("scale", [0.01, 30.0])
@pytest.mark.parametrize("top_k", [20, ALL])
def test_flat_and_peaked_rows(scale, top_k):
    """Differences of up to 200 leave no weight to most tokens: float32 flushes e^-104."""
    logits = random_logits(2, 300, 3, scale=scale)
    sampling = settings(2, top_k=top_k, top_p=0.95)
    actual, expected = filter_probs(logits, *sampling), reference(logits, *sampling)
    assert torch.equal(actual > 1e-30, expected > 1e-30)
    torch.testing.assert_close(actual, expected, rtol=6e-5, atol=1e-7)  # |x| <= 200


def test_masked_tokens_stay_out():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    for use_top_k_top_p in (False, True):
        for top_k in (2, 3, ALL):
            sampling = settings(1, top_k=top_k)
            probs = filter_probs(logits, *sampling, use_top_k_top_p=use_top_k_top_p)
            assert (probs > 0).tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_read_as_float32(dtype):
    logits = random_logits(3, 100, 0).to(dtype)
    sampling = random_sampling(3, 100, 0)
    # Compiled, sums of another dtype may be taken in another order.
    assert_same(filter_probs(logits, *sampling), filter_probs(logits.float(), *sampling))


def test_rows_of_a_larger_tensor():
    logits = random_logits(6, 120, 0)
    part = logits.view(3, 2, 120)[:, 1, :100]
    sampling = random_sampling(3, 100, 0)
    assert_same(filter_probs(part, *sampling), reference(part, *sampling))


def test_no_requests():
    assert filter_probs(torch.zeros(0, 7), *settings(0)).shape == (0, 7)


def test_another_setting_is_noticed():
    """Control: each of the four changes what survives or its weight."""
    logits = random_logits(1, 100, 0, scale=1.0)
    given = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    probs = filter_probs(logits, *settings(1, **given))
    for name, value in (("temperature", 1.0), ("top_k", 3), ("top_p", 0.5), ("min_p", 0.4)):
        changed = reference(logits, *settings(1, **(given | {name: value})))
        with pytest.raises(AssertionError):
            assert_same(probs, changed)
