"""Mixes of the target's keys and values: the Triton kernel equals the loop."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.mix_kv import mix_kv as reference
from specstack_kernels.testing_rows import SCALE, poisoned, random_rows
from specstack_kernels.triton import kv_heads
from specstack_kernels.triton.mix_kv import mix_kv

SHAPES = [(1, 1, 1, 1, 16), (5, 2, 2, 3, 24), (17, 2, 1, 2, 64), (65, 1, 2, 2, 48)]
"""(T, m, n, G, C): a lone token, tap and head, odd sizes, one past a block of 16 and of 64."""
IDS = ["T{}-m{}-n{}-G{}-C{}".format(*shape) for shape in SHAPES]
TOLERANCES = {
    # Sums of up to 256 products: 256 roundings of 2^-24 of numbers up to 4.
    torch.float32: 5e-5,
    # Rotated-back keys are rounded (2^-11), the products average that out, the result is rounded.
    torch.float16: 5e-3,
    # Likewise at 2^-8, or where the interpreter cuts off, 2^-7 and towards zero: 2^-6 of the
    # result in all, and 0.009 for four deviations of what the products average out.
    torch.bfloat16: 2e-2,
}


def random_inputs(shape, dtype, *, kept=0.7):
    tokens, taps, layers, heads, head_dim = shape
    torch.manual_seed(sum(shape))
    rows = random_rows(tokens, layers, heads, head_dim, dtype, kept=kept)
    # As views of a larger feature tensor, other taps NaN.
    tapped = torch.full((2, tokens, taps + 1, heads, head_dim), torch.nan)
    tapped[:, :, :taps] = torch.randn(2, tokens, taps, heads, head_dim)
    keys, values = (poisoned(x, rows.is_kept).to(dtype)[:, :taps] for x in tapped)
    width = heads * head_dim
    k_mix, v_mix = torch.randn(2, layers, width, taps * width) / (taps * width) ** 0.5
    return (keys, values, k_mix.to(dtype), v_mix.to(dtype)), rows


def set_parts(monkeypatch, parts):
    """One part, or as many as there are steps."""
    monkeypatch.setattr(kv_heads, "MIN_PROGRAMS", 1 if parts == "one" else 1 << 20)
    monkeypatch.setattr(kv_heads, "MIN_STEPS", 1)


def check(inputs, rows, tolerance, *, is_derotated=True):
    expected, actual = rows.copy(), rows.copy()
    reference(*inputs, *expected, is_derotated=is_derotated, scale=SCALE)
    mix_kv(*inputs, *actual, is_derotated=is_derotated, scale=SCALE)
    torch.testing.assert_close(actual.pool(), expected.pool(), atol=tolerance, rtol=tolerance)
    return actual.pool()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("parts", ["one", "many"])
@pytest.mark.parametrize("is_derotated", [False, True], ids=["linear", "derotated"])
def test_equals_the_definition(shape, dtype, parts, is_derotated, monkeypatch):
    set_parts(monkeypatch, parts)
    inputs, rows = random_inputs(shape, dtype)
    check(inputs, rows, TOLERANCES[dtype], is_derotated=is_derotated)


@pytest.mark.parametrize("parts", ["one", "many"])
def test_nothing_kept_writes_nothing(parts, monkeypatch):
    set_parts(monkeypatch, parts)
    inputs, rows = random_inputs(SHAPES[2], torch.float32, kept=0.0)
    assert torch.equal(check(inputs, rows, 0.0), rows.pool())


def test_no_tokens():
    inputs, rows = random_inputs((0, 2, 1, 1, 16), torch.float32)
    check(inputs, rows, 0.0)


def test_every_input_counts():
    inputs, rows = random_inputs((3, 2, 1, 2, 16), torch.float32)
    before = check(inputs, rows, 5e-5)
    for changed in range(4):
        others = [x.clone() for x in inputs]
        others[changed][0, ..., -1] += 1.0
        after = rows.copy()
        mix_kv(*others, *after, is_derotated=True, scale=SCALE)
        assert not torch.allclose(after.pool(), before, atol=1e-3)
    linear = rows.copy()
    mix_kv(*inputs, *linear, is_derotated=False, scale=SCALE)
    torch.testing.assert_close(linear.pool()[1], before[1], atol=5e-5, rtol=5e-5)
    assert not torch.allclose(linear.pool()[0], before[0], atol=1e-3)
