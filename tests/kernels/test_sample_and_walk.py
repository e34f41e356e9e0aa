"""Sample-and-walk: the vectorised op equals the loop that filters every node."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels import ops
from specstack_kernels.reference.sample_and_walk import invert_cdf as reference_invert_cdf
from specstack_kernels.reference.sample_and_walk import sample_and_walk as reference
from specstack_kernels.testing import TREE_SHAPES, random_sampling, random_tree

SHAPES = [pytest.param(*s, id="B{}-N{}-V{}".format(*s)) for s in TREE_SHAPES]
LAST_UNIFORM = 1.0 - 2.0**-53


def random_inputs(batch, nodes, vocab, seed):
    *tree, max_depth = random_tree(batch, nodes, vocab, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((batch * nodes, vocab), generator=generator) * 2
    rows = torch.randperm(batch * nodes, generator=generator).view(batch, nodes)
    uniforms = torch.rand((batch, max_depth + 1), generator=generator, dtype=torch.float64)
    return tree, (logits, rows), random_sampling(batch, vocab, seed), uniforms, max_depth


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES)
@pytest.mark.parametrize("use_top_k_top_p", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition(batch, nodes, vocab, seed, use_top_k_top_p):
    tree, logits, sampling, uniforms, max_depth = random_inputs(batch, nodes, vocab, seed)
    limits = {"max_depth": max_depth, "use_top_k_top_p": use_top_k_top_p}
    actual = ops.sample_and_walk(*tree, *logits, *sampling, uniforms, **limits)
    expected = reference(*tree, *logits, *sampling, uniforms, **limits)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@given(st.integers(1, 4), st.integers(1, 24), st.integers(2, 5), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_top_k_1_degenerates_to_greedy_acceptance(batch, nodes, vocab, seed):
    tree, logits, sampling, uniforms, max_depth = random_inputs(batch, nodes, vocab, seed)
    sampling = sampling._replace(top_k=torch.ones_like(sampling.top_k))
    sampled = ops.sample_and_walk(*tree, *logits, *sampling, uniforms, max_depth=max_depth)
    greedy = ops.accept_greedy(*tree, logits[0].argmax(dim=-1)[logits[1]], max_depth=max_depth)
    for a, b in zip(sampled, greedy, strict=True):
        assert torch.equal(a, b)


@given(
    st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=30),
    st.floats(0.0, LAST_UNIFORM),
)
@settings(max_examples=200, deadline=None)
def test_inverse_cdf_equals_the_loop_and_never_draws_an_excluded_token(weights, uniform):
    probs = torch.tensor([weights])
    probs[0, len(weights) // 2] += 0.5
    for u in (0.0, uniform, LAST_UNIFORM):
        token = int(ops.invert_cdf(probs, torch.tensor([u], dtype=torch.float64)))
        assert probs[0, token] > 0
        if u == 0.0:
            assert token == reference_invert_cdf(probs[0], u)
    # Away from the borders of the cells, which rounding may move, both agree.
    cdf = probs[0].double().cumsum(0)
    if (cdf - uniform * cdf[-1]).abs().min() > 1e-12:
        u = torch.tensor([uniform], dtype=torch.float64)
        assert int(ops.invert_cdf(probs, u)) == reference_invert_cdf(probs[0], uniform)


def test_bfloat16_logits_are_filtered_in_float32():
    tree, (logits, rows), sampling, uniforms, max_depth = random_inputs(3, 7, 2, 0)
    low, full = (
        ops.sample_and_walk(*tree, values, rows, *sampling, uniforms, max_depth=max_depth)
        for values in (logits.bfloat16(), logits.bfloat16().float())
    )
    assert torch.equal(low.emitted, full.emitted)
