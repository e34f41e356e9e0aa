"""Maps of the target's KV added to a layer's own: the Triton kernel equals the loop."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.sum_kv import sum_kv as reference
from specstack_kernels.testing_rows import SCALE, poisoned, random_rows
from specstack_kernels.triton.sum_kv import sum_kv

SHAPES = [(1, 1, 1, 16, 0), (5, 2, 3, 24, 0), (65, 2, 2, 48, 0), (1, 1, 1, 16, 1),
          (5, 2, 3, 24, 3), (17, 1, 2, 64, 20), (65, 2, 2, 48, 16)]  # fmt: skip
"""(T, n, G, C, R): a lone token and head, odd sizes, one past a block; rank 0 is a diagonal."""
IDS = ["T{}-n{}-G{}-C{}-R{}".format(*shape) for shape in SHAPES]
TOLERANCES = {
    # Sums of 128 products, then of 20: roundings of 2^-24 of numbers up to 4.
    torch.float32: 5e-5,
    # Keys rotated back and the R numbers between the maps are rounded (2^-11), then the sum is.
    torch.float16: 5e-3,
    # Likewise at 2^-8, or where the interpreter cuts off, 2^-7 and towards zero: keys and the R
    # numbers shrink what is added (up to 4) by 2^-8 each, 0.03, the sum is off by 2^-7 + 2^-8 of
    # itself, and what is averaged out adds 0.009.
    torch.bfloat16: 4e-2,
}


def random_inputs(shape, dtype, *, kept=0.7):
    tokens, layers, heads, head_dim, rank = shape
    torch.manual_seed(sum(shape))
    rows = random_rows(tokens, layers, heads, head_dim, dtype, kept=kept)
    tapped = torch.full((2, tokens, layers + 1, heads, head_dim), torch.nan)
    tapped[:, :, :layers] = torch.randn(2, tokens, layers, heads, head_dim)
    keys, values = (poisoned(x, rows.is_kept).to(dtype)[:, :layers] for x in tapped)
    width = heads * head_dim
    if rank == 0:
        k_up, v_up = torch.randn(2, layers, width).to(dtype)
        return (keys, values, None, None, k_up, v_up), rows
    k_down, v_down = (torch.randn(2, layers, rank, width) / width**0.5).to(dtype)
    k_up, v_up = (torch.randn(2, layers, width, rank) / rank**0.5).to(dtype)
    return (keys, values, k_down, v_down, k_up, v_up), rows


def check(inputs, rows, tolerance):
    expected, actual = rows.copy(), rows.copy()
    reference(*inputs, *expected, scale=SCALE)
    sum_kv(*inputs, *actual, scale=SCALE)
    torch.testing.assert_close(actual.pool(), expected.pool(), atol=tolerance, rtol=tolerance)
    return actual.pool()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_equals_the_definition(shape, dtype):
    check(*random_inputs(shape, dtype), TOLERANCES[dtype])


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=["diagonal", "rank"])
def test_nothing_kept_adds_nothing(shape):
    inputs, rows = random_inputs(shape, torch.float32, kept=0.0)
    assert torch.equal(check(inputs, rows, 0.0), rows.pool())


@pytest.mark.parametrize("rank", [0, 3])
def test_no_tokens(rank):
    inputs, rows = random_inputs((0, 2, 1, 16, rank), torch.float32)
    check(inputs, rows, 0.0)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=["diagonal", "rank"])
def test_every_input_counts(shape):
    inputs, rows = random_inputs(shape, torch.float32)
    before = check(inputs, rows, 5e-5)
    for changed in (i for i, x in enumerate(inputs) if x is not None):
        others = [None if x is None else x.clone() for x in inputs]
        others[changed][0, ..., -1] += 1.0
        after = rows.copy()
        sum_kv(*others, *after, scale=SCALE)
        assert not torch.allclose(after.pool(), before, atol=1e-3)


def test_maps_of_zero_change_nothing():
    inputs, rows = random_inputs(SHAPES[5], torch.float32)
    zeros = [*inputs[:4], torch.zeros_like(inputs[4]), torch.zeros_like(inputs[5])]
    assert torch.equal(check(zeros, rows, 0.0), rows.pool())
