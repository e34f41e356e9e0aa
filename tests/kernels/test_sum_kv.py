"""Maps of the target's KV added to a layer's own: the vectorised op equals the loop and a head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.models.heads import testing as heads_testing
from specstack.models.heads.layers import LayerKV
from specstack.models.heads.rotary import Rotary
from specstack.models.heads.sources import KvSum
from specstack_kernels.reference.sum_kv import sum_kv as reference
from specstack_kernels.testing_rows import SCALE, poisoned, random_rows
from specstack_kernels.torch_ops.sum_kv import sum_kv

TOLERANCES = {
    torch.float64: 1e-6,  # cos and sin are float32
    torch.float32: 5e-5,  # sums of up to 72 products of numbers of the order of one
    # The rotated-back keys, both maps and the result are rounded, by 2^-8 of numbers up to 6.
    torch.bfloat16: 0.1,
}


def random_inputs(shape, dtype, seed, *, kept=0.7):
    tokens, layers, heads, head_dim, rank = shape
    torch.manual_seed(seed)
    rows = random_rows(tokens, layers, heads, head_dim, dtype, kept=kept)
    tapped = torch.randn(2, tokens, layers, heads, head_dim)
    keys, values = (poisoned(x, rows.is_kept).to(dtype) for x in tapped)
    width = heads * head_dim
    if rank == 0:
        return (keys, values, None, None, *torch.randn(2, layers, width).to(dtype)), rows
    downs = (torch.randn(2, layers, rank, width) / width**0.5).to(dtype)
    ups = (torch.randn(2, layers, width, rank) / rank**0.5).to(dtype)
    return (keys, values, *downs, *ups), rows


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@given(
    st.tuples(
        st.integers(0, 9), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 8, 24]),
        st.integers(0, 7),
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_equals_the_definition(dtype, shape, kept, seed):
    inputs, rows = random_inputs(shape, dtype, seed, kept=kept)
    expected, actual = rows.copy(), rows.copy()
    reference(*inputs, *expected, scale=SCALE)
    sum_kv(*inputs, *actual, scale=SCALE)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.pool(), expected.pool(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context", [heads_testing.SUM, heads_testing.SUM_LOW_RANK], ids=str)
def test_equals_the_heads_modules(dtype, context):
    torch.manual_seed(0)
    config = heads_testing.tiny_config(context=context)
    sums = [KvSum(config).to(dtype) for _ in range(2)]
    rows = torch.randn(21, 2, 2, 2, 8).to(dtype)
    before, kv_slots = rows.clone(), torch.randperm(20)[:11]
    features = heads_testing.random_features(config, 11, dtype=dtype)
    rotation = Rotary(config.target)(torch.randint(100, (11,)))
    for module in sums:
        heads_testing.randomise(module)
    maps = [(module.k_map, module.v_map) for module in sums]
    is_diagonal = config.context.sum_rank == 0
    k_up, v_up = (torch.stack([(x if is_diagonal else x[1]).weight for x in side])
                  for side in zip(*maps, strict=True))  # fmt: skip
    k_down, v_down = (None if is_diagonal else torch.stack([x[0].weight for x in side])
                      for side in zip(*maps, strict=True))  # fmt: skip
    with torch.no_grad():
        sum_kv(
            features.keys, features.values, k_down, v_down, k_up, v_up,
            rotation.cos[:, 0], rotation.sin[:, 0], kv_slots,
            torch.ones(11, dtype=torch.bool), rows[:, :, 0], rows[:, :, 1], scale=rotation.scale,
        )  # fmt: skip
        for layer, module in enumerate(sums):
            own = LayerKV(before[kv_slots, layer, 0], before[kv_slots, layer, 1])
            target = LayerKV(features.keys[:, layer], features.values[:, layer])
            expected = module(own, target, rotation)
            # Batched products may add in another order.
            tolerance = 1e-5 if dtype == torch.float32 else 4e-2
            for side, kept in ((0, expected.keys), (1, expected.values)):
                actual = rows[kv_slots, layer, side]
                torch.testing.assert_close(actual, kept, atol=tolerance, rtol=0)
    assert not torch.allclose(rows, before)
