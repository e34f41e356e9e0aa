"""Context keys and values: the vectorised op equals the loop, and what a head and a pool do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.drafters.draft_pool import DraftPool
from specstack.models.heads import testing as heads_testing
from specstack.models.heads.block import BlockHead
from specstack_kernels.reference.context_kv import context_kv as reference
from specstack_kernels.testing_rows import poisoned, random_rows
from specstack_kernels.torch_ops.context_kv import context_kv

TOLERANCES = {
    torch.float64: 1e-6,  # cos and sin are float32
    torch.float32: 2e-5,  # sums of up to 90 products of the order of one
    # The normalised input, the projection, the normalised key and the result are rounded, by 2^-8
    # of numbers up to 4.
    torch.bfloat16: 6e-2,
}
EPS = 1e-5


def random_inputs(shape, dtype, seed, *, k_norm=True, kept=0.7):
    tokens, hidden, layers, heads, head_dim = shape
    torch.manual_seed(seed)
    rows = random_rows(tokens, layers, heads, head_dim, dtype, kept=kept)
    fused = poisoned(torch.randn(tokens, hidden), rows.is_kept)
    k_weight, v_weight = torch.randn(2, layers, heads * head_dim, hidden) / hidden**0.5
    weights = (
        1 + torch.randn(layers, hidden) / 4,
        k_weight,
        v_weight,
        1 + torch.randn(layers, head_dim) / 4 if k_norm else None,
    )
    weights = [None if weight is None else weight.to(dtype) for weight in weights]
    return (fused.to(dtype), *weights), rows


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@given(
    st.tuples(
        st.integers(0, 9), st.integers(1, 90), st.integers(1, 3), st.integers(1, 3),
        st.sampled_from([2, 8, 24]),
    ),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_equals_the_definition(dtype, shape, k_norm, kept, seed):
    inputs, rows = random_inputs(shape, dtype, seed, k_norm=k_norm, kept=kept)
    expected, actual = rows.copy(), rows.copy()
    reference(*inputs, *expected, eps=EPS)
    context_kv(*inputs, *actual, eps=EPS)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.pool(), expected.pool(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("qk_norm", [True, False], ids=["k-norm", "no k-norm"])
def test_equals_a_head_that_writes_its_context_to_a_pool(dtype, qk_norm):
    torch.manual_seed(0)
    config = heads_testing.tiny_config(target={"qk_norm": qk_norm})
    head = BlockHead(config, heads_testing.random_tables(config, dtype))
    heads_testing.randomise(head)
    features = heads_testing.random_features(config, 11, dtype=dtype)
    positions, kv_slots = torch.randint(100, (11,)), torch.randperm(20)[:11]
    is_kept = torch.arange(11) % 3 > 0
    pool = DraftPool(2, 20, 2, 8, torch.device("cpu"), dtype)
    with torch.no_grad():
        pool.write(kv_slots, head.context(features, positions), is_kept)
        rotation, attention = head.rotary(positions), [x.self_attn for x in head.layers]
        rows = torch.zeros(21, 2, 2, 2, 8, dtype=dtype)
        context_kv(
            head.fuse(features),
            torch.stack([x.input_layernorm.weight for x in head.layers]),
            torch.stack([x.k_proj.weight for x in attention]),
            torch.stack([x.v_proj.weight for x in attention]),
            torch.stack([x.k_norm.weight for x in attention]) if qk_norm else None,
            rotation.cos[:, 0],
            rotation.sin[:, 0],
            kv_slots,
            is_kept,
            rows[:, :, 0],
            rows[:, :, 1],
            eps=config.target.rms_norm_eps,
        )
    for layer, expected in enumerate(pool.layers):
        assert torch.equal(rows[:-1, layer, 0], expected.keys[:-1])
        assert torch.equal(rows[:-1, layer, 1], expected.values[:-1])
    assert bool((rows[:-1] != 0).any())
