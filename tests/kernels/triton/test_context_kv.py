"""Context keys and values: the Triton kernel equals the loop, in one part or several."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.context_kv import context_kv as reference
from specstack_kernels.testing_rows import poisoned, random_rows
from specstack_kernels.triton import kv_heads
from specstack_kernels.triton.context_kv import context_kv

SHAPES = [(1, 64, 1, 1, 16), (5, 100, 2, 3, 24), (17, 130, 1, 2, 64), (65, 48, 1, 2, 32)]
"""(T, D, n, G, C): a lone token and head, odd sizes, one past a block of 16 and of 64."""
IDS = ["T{}-D{}-n{}-G{}-C{}".format(*shape) for shape in SHAPES]
TOLERANCES = {
    # Sums of 130 products of numbers of the order of one: 130 roundings of 2^-24.
    torch.float32: 2e-5,
    # x * norm_weight is rounded (2^-11), which 130 products average out to 2^-11 of the sum; the
    # norm and RoPE keep that, and the result is rounded again. Keys go up to 4.
    torch.float16: 5e-3,
    # The same at 2^-8 by rounding, which the reference does once; the interpreter cuts off, by up
    # to 2^-7 and always towards zero, so that a sum also shrinks by 2^-8. Of the result e that is
    # 2^-7 + 2^-8 + 2^-8, and the spread, 2^-7 / sqrt(12), is averaged as before: four deviations
    # of a sum of the order of one are 0.009.
    torch.bfloat16: 2e-2,
}
EPS = 1e-5


def random_inputs(shape, dtype, *, k_norm=True, kept=0.7):
    tokens, hidden, layers, heads, head_dim = shape
    torch.manual_seed(sum(shape))
    rows = random_rows(tokens, layers, heads, head_dim, dtype, kept=kept)
    wide = torch.full((tokens, hidden + 7), torch.nan)
    wide[:, :hidden] = poisoned(2 * torch.randn(tokens, hidden), rows.is_kept)
    k_weight, v_weight = torch.randn(2, layers, heads * head_dim, hidden) / hidden**0.5
    weights = (
        1 + torch.randn(layers, hidden) / 4,
        k_weight,
        v_weight,
        1 + torch.randn(layers, head_dim) / 4 if k_norm else None,
    )
    weights = [None if weight is None else weight.to(dtype) for weight in weights]
    return (wide.to(dtype)[:, :hidden], *weights), rows


def set_parts(monkeypatch, parts):
    """One part, or as many as there are steps."""
    monkeypatch.setattr(kv_heads, "MIN_PROGRAMS", 1 if parts == "one" else 1 << 20)
    monkeypatch.setattr(kv_heads, "MIN_STEPS", 1)


def check(inputs, rows, tolerance):
    expected, actual = rows.copy(), rows.copy()
    reference(*inputs, *expected, eps=EPS)
    context_kv(*inputs, *actual, eps=EPS)
    torch.testing.assert_close(actual.pool(), expected.pool(), atol=tolerance, rtol=tolerance)
    is_written = torch.zeros(len(rows.pool_keys), dtype=torch.bool)
    is_written[rows.kv_slots[rows.is_kept]] = True
    assert torch.equal(actual.pool()[:, ~is_written[:-1]], rows.pool()[:, ~is_written[:-1]])
    return actual.pool()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("parts", ["one", "many"])
def test_equals_the_definition(shape, dtype, parts, monkeypatch):
    set_parts(monkeypatch, parts)
    check(*random_inputs(shape, dtype), TOLERANCES[dtype])


@pytest.mark.parametrize("parts", ["one", "many"])
def test_a_target_without_k_norm(parts, monkeypatch):
    set_parts(monkeypatch, parts)
    check(*random_inputs(SHAPES[1], torch.float32, k_norm=False), 2e-5)


@pytest.mark.parametrize("parts", ["one", "many"])
def test_nothing_kept_writes_nothing(parts, monkeypatch):
    set_parts(monkeypatch, parts)
    inputs, rows = random_inputs(SHAPES[2], torch.float32, kept=0.0)
    assert torch.equal(check(inputs, rows, 0.0), rows.pool())


def test_no_tokens():
    inputs, rows = random_inputs((0, 40, 1, 1, 16), torch.float32)
    check(inputs, rows, 0.0)


def test_every_weight_counts():
    inputs, rows = random_inputs(SHAPES[1], torch.float32)
    before = check(inputs, rows, 2e-5)
    for changed in range(5):
        others = [x.clone() for x in inputs]
        others[changed][0, ..., -1] += 1.0
        after = rows.copy()
        context_kv(*others, *after, eps=EPS)
        assert not torch.allclose(after.pool(), before, atol=1e-3)
    turned = rows.copy()._replace(sin=-rows.sin)
    context_kv(*inputs, *turned, eps=EPS)
    assert torch.equal(turned.pool()[1], before[1])
    assert not torch.allclose(turned.pool()[0], before[0], atol=1e-3)


def test_the_inner_axis_is_split_where_heads_are_few():
    assert kv_heads.num_parts(256, 64) == 1
    assert kv_heads.num_parts(8, 64) == 16  # four steps each
    assert kv_heads.num_parts(40, 64) == 8
    assert kv_heads.num_parts(1, 3) == 1
