"""The most probable tokens in Triton: equal the loop, ties included."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.top_tokens import top_tokens as reference
from specstack_kernels.triton import top_tokens as module
from specstack_kernels.triton.top_tokens import BLOCK, CHUNKS, top_tokens

SHAPES = [
    (1, 1, 1), (3, 7, 7), (2, CHUNKS[0], 3), (3, 5 * CHUNKS[-1] + 1, 4), (1, 1000, 70),
    (2, BLOCK + 1, 5), (1, 3 * BLOCK - 1, 17),
]  # fmt: skip
"""(R, V, k): one token, all of them, a chunk, odd, more than chunks, one past a block, blocks."""
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
    logits = random_logits(rows, vocab, vocab + k, ties=ties).to(dtype)
    assert_same(top_tokens(logits, k), reference(logits, k))


@pytest.mark.parametrize("seed", range(4))
def test_ties_go_to_the_lowest_token(seed):
    """Three values, zeros of either sign, masked tokens: mostly ties."""
    logits = random_logits(2, 300, seed).clamp(-1, 1).round()
    logits[:, 1::3] *= -1
    logits[:, 2::5] = -torch.inf
    for k in (1, 8, 33):
        assert_same(top_tokens(logits, k), reference(logits, k))


def test_a_block_without_probability():
    """Masked tokens fill the first block: it adds nothing."""
    logits = random_logits(2, BLOCK + 200, 0)
    logits[:, :BLOCK] = -torch.inf
    assert_same(top_tokens(logits, 4), reference(logits, 4))


def test_masked_tokens_come_last():
    logits = torch.full((1, 40), -torch.inf)
    logits[0, 30] = 1.0
    found = top_tokens(logits, 3)
    assert found.tokens.tolist() == [[30, 0, 1]]
    assert found.log_probs.tolist() == [[0.0, -torch.inf, -torch.inf]]


def test_columns_have_ids():
    logits = random_logits(3, 200, 0)
    token_ids = torch.arange(200) * 3 + 1
    found = top_tokens(logits, 6, token_ids=token_ids)
    assert_same(found, reference(logits, 6, token_ids=token_ids))


def test_rows_of_a_larger_tensor():
    """What lies beyond the row is not read."""
    logits = random_logits(6, 300, 0).view(3, 2, 300)
    logits[:, :, 200:] = torch.nan
    assert_same(top_tokens(logits[:, 1, :200], 5), reference(logits[:, 1, :200], 5))


def test_where_keys_are_too_many_they_are_sorted(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEYS", 256)
    monkeypatch.setattr(module, "_scan_blocks_kernel", None)
    logits = random_logits(2, 1000, 0)
    assert_same(top_tokens(logits, 100), reference(logits, 100))


def test_chunks_are_chosen_by_the_number_of_keys():
    assert module._chunk(151_936, 16) == 128
    assert module._chunk(151_936, 1024) == 16
    assert module._chunk(151_936, 1025) is None


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
