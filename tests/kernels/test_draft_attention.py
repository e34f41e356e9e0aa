"""Attention over paged context: torch's own equals the loops, and what the drafters do today."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.drafters.draft_pool import DraftPool, live_columns
from specstack.models.heads.layers import LayerKV, attend
from specstack_kernels.reference.draft_attention import draft_attention as reference
from specstack_kernels.testing_attention import AttentionShape, largest_value, random_attention
from specstack_kernels.torch_ops.draft_attention import draft_attention

# torch may round scores, weights and output to the inputs' type, each by half a unit in the last
# place. A score's error d scales its weight by exp(d): with |score| < 8, which is 8 units, that is
# twice 8 units in numerator and denominator; weights and output add one each.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FACTOR = 2 * 8 + 2


def assert_close(actual, expected, inputs):
    assert actual.dtype == expected.dtype
    assert not actual.isnan().any()
    tolerance = FACTOR * UNIT[actual.dtype] * largest_value(inputs)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=tolerance)


SHAPES = [
    AttentionShape(1, 1, 1, 1, 1, 64),
    AttentionShape(3, 7, 37, 6, 2, 64),
    AttentionShape(2, 16, 65, 8, 8, 128),
    AttentionShape(2, 5, 33, 8, 1, 64, torch.bfloat16),
    AttentionShape(2, 5, 33, 8, 2, 128, torch.float16),
]


@pytest.mark.parametrize("mask", ["tree", "full", "random"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape, mask):
    inputs = random_attention(shape, mask=mask)
    assert_close(draft_attention(*inputs), reference(*inputs), inputs)


@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(0, 9), st.sampled_from([1, 3, 4]),
    st.integers(1, 2), st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_equals_the_definition_anywhere(batch, queries, columns, group, kv_heads, seed):
    shape = AttentionShape(batch, queries, columns, group * kv_heads, kv_heads, 16)
    inputs = random_attention(shape, seed, mask="random")
    assert_close(draft_attention(*inputs, scale=0.3), reference(*inputs, scale=0.3), inputs)


def test_a_query_that_sees_nothing_reads_zeros():
    shape = AttentionShape(2, 3, 4, 2, 1, 16)
    inputs = random_attention(shape, mask="full", seq_lens=[4, 0])
    inputs.mask[:, 1] = False
    output = draft_attention(*inputs)
    assert torch.equal(output[1, 1], torch.zeros(2, 16))
    assert (output[0, 1] != 0).all()
    assert_close(output, reference(*inputs), inputs)


def test_columns_beyond_the_length_may_hold_any_slot():
    inputs = random_attention(AttentionShape(2, 3, 9, 2, 1, 16), seq_lens=[9, 4])
    expected = draft_attention(*inputs)
    inputs.kv_slots[1, 4:] = 1 << 40
    assert torch.equal(draft_attention(*inputs), expected)


def test_equals_what_the_drafters_do():
    torch.manual_seed(0)
    batch, queries, columns, heads, kv_heads, head_dim = 2, 5, 11, 4, 2, 16
    pool = DraftPool(2, 40, kv_heads, head_dim, torch.device("cpu"), torch.float32)
    kv_slots = torch.randperm(40)[: batch * columns].view(batch, columns)
    seq_lens = torch.tensor([11, 6])
    is_live = live_columns(seq_lens, columns)
    layers = [LayerKV(*torch.randn(2, batch, columns, kv_heads, head_dim)) for _ in range(2)]
    pool.write(kv_slots, layers, is_live)
    own = LayerKV(*torch.randn(2, batch, queries, kv_heads, head_dim))
    asked = torch.randn(batch, queries, heads, head_dim)
    mask = torch.ones(batch, queries, queries, dtype=torch.bool).tril()
    for layer, read in zip(pool.layers, pool.read(kv_slots, is_live), strict=True):
        known = torch.cat([is_live[:, None].expand(-1, queries, -1), mask], dim=-1)
        expected = attend(
            asked,
            torch.cat([read.keys, own.keys], dim=1),
            torch.cat([read.values, own.values], dim=1),
            known,
        )
        actual = draft_attention(
            asked, layer.keys, layer.values, kv_slots, seq_lens, own.keys, own.values, mask
        )
        torch.testing.assert_close(actual.flatten(-2), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("field", ["pool_keys", "pool_values", "keys", "values", "queries"])
def test_the_comparison_notices_one_changed_element(field):
    inputs = random_attention(AttentionShape(2, 3, 9, 2, 1, 16), mask="full", seq_lens=[9, 9])
    expected = reference(*inputs)
    first = inputs.kv_slots[0, 0] if field.startswith("pool") else 0
    getattr(inputs, field)[first, 0] += 1
    with pytest.raises(AssertionError):
        assert_close(draft_attention(*inputs), expected, inputs)
