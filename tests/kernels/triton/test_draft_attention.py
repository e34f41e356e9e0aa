"""Triton's attention over paged context equals the definition, from poisoned pools and buffers."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.draft_attention import draft_attention as reference
from specstack_kernels.testing_attention import AttentionShape, largest_value, random_attention
from specstack_kernels.triton import draft_attention as module
from specstack_kernels.triton.draft_attention import draft_attention

# Weights and output are rounded once each to the inputs' type: two units of the largest value. The
# interpreter cuts bfloat16 off where hardware rounds, which is one more bit. Scores are float32
# sums of up to 128 products: their rounding errors add up to about sqrt(128) * 2^-24 * 8 = 5e-6,
# which is a weight's relative error, in numerator and denominator.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
SCORES = 1e-5

HALF, BF16 = torch.float16, torch.bfloat16
SHAPES = [
    pytest.param(AttentionShape(1, 1, 1, 1, 1, 64), id="one of everything"),
    pytest.param(AttentionShape(3, 7, 37, 6, 2, 64), id="odd, groups of 3"),
    pytest.param(AttentionShape(2, 16, 65, 4, 4, 128, HALF), id="groups of 1, one past a block"),
    pytest.param(AttentionShape(2, 16, 128, 8, 2, 128, BF16), id="groups of 4, full blocks"),
    pytest.param(AttentionShape(1, 17, 300, 8, 1, 64, BF16), id="groups of 8, two row blocks"),
    pytest.param(AttentionShape(1, 70, 90, 4, 2, 64, HALF), id="a block of several tiles"),
    pytest.param(AttentionShape(2, 3, 0, 4, 2, 64), id="no column"),
    pytest.param(AttentionShape(2, 3, 21, 4, 2, 80), id="a head size between powers of two"),
]


def assert_close(actual, expected, inputs):
    assert actual.dtype == expected.dtype
    assert not actual.isnan().any()
    tolerance = largest_value(inputs) * (2 * UNIT[actual.dtype] + SCORES)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=tolerance)


def splits_of(monkeypatch, columns):
    """Let a split be as short as `columns`."""
    monkeypatch.setattr(module, "MIN_SPLIT_COLUMNS", columns)


@pytest.mark.parametrize("mask", ["tree", "random"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(shape, mask):
    inputs = random_attention(shape, mask=mask)
    assert_close(draft_attention(*inputs), reference(*inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("lengths", [[700, 0, 1], [700, 65, 64], [0, 0, 0]], ids=str)
def test_splits_are_merged(monkeypatch, dtype, lengths):
    splits_of(monkeypatch, 16)
    shape = AttentionShape(3, 5, 700, 4, 1, 64, dtype)
    assert module._splits(3, 700) > 30
    inputs = random_attention(shape, mask="random", seq_lens=lengths)
    assert_close(draft_attention(*inputs), reference(*inputs), inputs)


@pytest.mark.parametrize("split_columns", [16, 10**6])
def test_a_query_that_sees_nothing_reads_zeros(monkeypatch, split_columns):
    splits_of(monkeypatch, split_columns)
    inputs = random_attention(AttentionShape(2, 3, 70, 2, 1, 64), mask="full", seq_lens=[70, 0])
    inputs.mask[:, 1] = False
    output = draft_attention(*inputs)
    assert torch.equal(output[1, 1], torch.zeros(2, 64))
    assert_close(output, reference(*inputs), inputs)


def test_a_scale_and_strided_slots():
    inputs = random_attention(AttentionShape(2, 3, 40, 2, 1, 64), seq_lens=[40, 7])
    wide = torch.full((2, 90), 1 << 40)
    wide[:, :40] = inputs.kv_slots
    wide[1, 7:] = 1 << 40
    inputs = inputs._replace(kv_slots=wide[:, :40])
    expected = reference(*inputs, scale=0.7)
    assert_close(draft_attention(*inputs, scale=0.7), expected, inputs)


def test_a_pool_of_one_layer():
    inputs = random_attention(AttentionShape(2, 3, 40, 4, 2, 64))
    pools = {name: getattr(inputs, name).contiguous() for name in ("pool_keys", "pool_values")}
    assert torch.equal(draft_attention(*inputs._replace(**pools)), draft_attention(*inputs))


def test_a_pool_with_scattered_heads_is_refused():
    inputs = random_attention(AttentionShape(1, 1, 4, 2, 2, 64))
    scattered = inputs.pool_keys.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="side by side"):
        draft_attention(*inputs._replace(pool_keys=scattered))


@pytest.mark.parametrize("field", ["pool_keys", "pool_values", "keys", "values", "queries"])
def test_the_comparison_notices_one_changed_row(field):
    inputs = random_attention(AttentionShape(2, 3, 9, 2, 1, 64, BF16), mask="full", seq_lens=[9, 9])
    expected = reference(*inputs)
    first = inputs.kv_slots[0, 0] if field.startswith("pool") else 0
    getattr(inputs, field)[first, 0] += 1
    with pytest.raises(AssertionError):
        assert_close(draft_attention(*inputs), expected, inputs)


def test_the_comparison_notices_one_bit_of_the_mask():
    inputs = random_attention(AttentionShape(2, 5, 9, 2, 1, 64, BF16), mask="full")
    expected = reference(*inputs)
    inputs.mask[1, 4, 3] = False
    with pytest.raises(AssertionError):
        assert_close(draft_attention(*inputs), expected, inputs)


def test_splits_fill_a_gpu_and_no_more():
    assert module._splits(8, 32768) == 32  # one request of Qwen3-8B: 256 programs
    assert module._splits(8, 600) == 3
    assert module._splits(64 * 8, 32768) == 1
    assert module._splits(1, 1 << 20) == module.MAX_SPLITS
    assert module._splits(8, 0) == 1
