"""Mixes of the target's keys and values: the vectorised op equals the loop, and a head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.drafters.draft_pool import DraftPool
from specstack.models.heads import testing as heads_testing
from specstack.models.heads.block import BlockHead
from specstack_kernels.reference.mix_kv import mix_kv as reference
from specstack_kernels.testing_rows import SCALE, poisoned, random_rows
from specstack_kernels.torch_ops.mix_kv import mix_kv

TOLERANCES = {
    torch.float64: 1e-6,  # cos and sin are float32
    torch.float32: 5e-5,  # sums of up to 216 products of numbers of the order of one
    # The rotated-back keys, the mix and the result are rounded, by 2^-8 of numbers up to 4.
    torch.bfloat16: 6e-2,
}


def random_inputs(shape, dtype, seed, *, kept=0.7):
    tokens, taps, layers, heads, head_dim = shape
    torch.manual_seed(seed)
    rows = random_rows(tokens, layers, heads, head_dim, dtype, kept=kept)
    tapped = torch.randn(2, tokens, taps, heads, head_dim)
    keys, values = (poisoned(x, rows.is_kept).to(dtype) for x in tapped)
    width = heads * head_dim
    mixes = torch.randn(2, layers, width, taps * width) / (taps * width) ** 0.5
    return (keys, values, *mixes.to(dtype)), rows


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@given(
    st.tuples(
        st.integers(0, 9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3),
        st.sampled_from([2, 8, 24]),
    ),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_equals_the_definition(dtype, shape, is_derotated, kept, seed):
    inputs, rows = random_inputs(shape, dtype, seed, kept=kept)
    expected, actual = rows.copy(), rows.copy()
    reference(*inputs, *expected, is_derotated=is_derotated, scale=SCALE)
    mix_kv(*inputs, *actual, is_derotated=is_derotated, scale=SCALE)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.pool(), expected.pool(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context", [heads_testing.KV_LINEAR, heads_testing.KV_DEROTATED], ids=str)
def test_equals_a_head_that_writes_its_context_to_a_pool(dtype, context):
    torch.manual_seed(0)
    config = heads_testing.tiny_config(context=context)
    head = BlockHead(config, heads_testing.random_tables(config, dtype))
    heads_testing.randomise(head)
    features = heads_testing.random_features(config, 11, dtype=dtype)
    positions, kv_slots = torch.randint(100, (11,)), torch.randperm(20)[:11]
    is_kept = torch.arange(11) % 3 > 0
    pool = DraftPool(2, 20, 2, 8, torch.device("cpu"), dtype)
    with torch.no_grad():
        pool.write(kv_slots, head.context(features, positions), is_kept)
        rotation, rows = head.rotary(positions), torch.zeros(21, 2, 2, 2, 8, dtype=dtype)
        mix_kv(
            features.keys,
            features.values,
            torch.stack([view.k_mix.weight for view in head.target_kv]),
            torch.stack([view.v_mix.weight for view in head.target_kv]),
            rotation.cos[:, 0],
            rotation.sin[:, 0],
            kv_slots,
            is_kept,
            rows[:, :, 0],
            rows[:, :, 1],
            is_derotated=config.context.kv_mix == "linear_derotated",
            scale=rotation.scale,
        )
    for layer, expected in enumerate(pool.layers):
        assert torch.equal(rows[:-1, layer, 0], expected.keys[:-1])
        assert torch.equal(rows[:-1, layer, 1], expected.values[:-1])
    assert bool((rows[:-1] != 0).any())


def test_a_derotated_mix_of_one_keeps_the_target():
    """The identity in the unrotated frame gives the target's own keys back; in the other not."""
    inputs, rows = random_inputs((4, 1, 1, 2, 8), torch.float32, 0, kept=1.0)
    identity = torch.eye(16)[None]
    derotated, linear = rows.copy(), rows.copy()
    mix_kv(*inputs[:2], identity, identity, *derotated, is_derotated=True, scale=SCALE)
    mix_kv(*inputs[:2], identity, identity, *linear, is_derotated=False, scale=SCALE)
    torch.testing.assert_close(derotated.pool_keys[rows.kv_slots, 0], inputs[0][:, 0])
    assert not torch.allclose(linear.pool_keys[rows.kv_slots, 0], inputs[0][:, 0], atol=0.1)
