"""Sample-and-walk in Triton: equals the loop that filters every node, and reads visited rows only.

Draws and filters agree away from the borders of cells and cuts, which rounding moves by about
1e-6; seeds are fixed, so that no case here stands on one by accident.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels.reference.accept_greedy import accept_greedy
from specstack_kernels.reference.sample_and_walk import invert_cdf as reference_invert_cdf
from specstack_kernels.reference.sample_and_walk import sample_and_walk as reference
from specstack_kernels.testing import TREE_SHAPES, random_sampling, random_tree
from specstack_kernels.triton import filter_probs as filter_module
from specstack_kernels.triton.filter_probs import MAX_BLOCK
from specstack_kernels.triton.sample_and_walk import invert_cdf, sample_and_walk

SHAPES = [*TREE_SHAPES, (2, 9, 300)]
IDS = ["B{}-N{}-V{}".format(*shape) for shape in SHAPES]
LAST_UNIFORM = 1.0 - 2.0**-53
POISON = -0x5EADBEEF0BAD


def random_inputs(batch, nodes, vocab, seed):
    *tree, max_depth = random_tree(batch, nodes, vocab, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((batch * nodes, vocab), generator=generator) * 2
    rows = torch.randperm(batch * nodes, generator=generator).view(batch, nodes)
    uniforms = torch.rand((batch, max_depth + 1), generator=generator, dtype=torch.float64)
    return tree, (logits, rows), random_sampling(batch, vocab, seed), uniforms, max_depth


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES, ids=IDS)
@pytest.mark.parametrize("use_top_k_top_p", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(batch, nodes, vocab, seed, use_top_k_top_p):
    tree, logits, sampling, uniforms, max_depth = random_inputs(batch, nodes, vocab, seed)
    limits = {"max_depth": max_depth, "use_top_k_top_p": use_top_k_top_p}
    actual = sample_and_walk(*tree, *logits, *sampling, uniforms, **limits)
    assert_same(actual, reference(*tree, *logits, *sampling, uniforms, **limits))


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_many_blocks(seed, monkeypatch):
    monkeypatch.setattr(filter_module, "MAX_BLOCK", 16)
    tree, logits, sampling, uniforms, max_depth = random_inputs(2, 9, 300, seed)
    actual = sample_and_walk(*tree, *logits, *sampling, uniforms, max_depth=max_depth)
    assert_same(actual, reference(*tree, *logits, *sampling, uniforms, max_depth=max_depth))


def test_rows_of_more_than_a_block():
    """Every draft is what the target draws, so that the walk goes on to the chain's end."""
    nodes, vocab = 3, 2 * MAX_BLOCK + 5
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, nodes, vocab), generator=generator) * 3
    uniforms = torch.rand((2, nodes), generator=generator)
    sampling = (
        torch.tensor([0.8, 1.0]),
        torch.tensor([1 << 30, 900]),
        torch.tensor([0.95, 1.0]),
        torch.tensor([0.0, 1e-4]),
    )
    parents = torch.arange(nodes).expand(2, -1) - 1
    rows = torch.arange(2 * nodes).view(2, nodes)
    tokens = torch.zeros((2, nodes), dtype=torch.int64)
    live = torch.tensor([nodes] * 2)
    inputs = (parents, live, logits.view(-1, vocab), rows, *sampling, uniforms)
    for depth in range(nodes):
        walk = sample_and_walk(tokens, *inputs, max_depth=depth)
        assert_same(walk, reference(tokens, *inputs, max_depth=depth))
        assert walk.accept_lens.tolist() == [depth + 1] * 2
        if depth + 1 < nodes:
            tokens[:, depth + 1] = walk.emitted[:, depth]
    assert walk.emitted.max() > MAX_BLOCK > walk.emitted.min()


@pytest.mark.parametrize("seed", range(3))
def test_only_visited_rows_are_read(seed):
    (tokens, parents, live), (logits, rows), *rest, max_depth = random_inputs(4, 33, 3, seed)
    sampling, uniforms = rest
    inputs = (tokens, parents, live, logits, rows, *sampling, uniforms)
    expected = reference(*inputs, max_depth=max_depth)
    visited = rows.gather(1, expected.accept_index.clamp(min=0)).flatten()
    is_visited = torch.zeros(len(logits), dtype=torch.bool).index_fill(0, visited, True)
    is_dead = torch.arange(33) >= live[:, None]
    poisoned = [values.masked_fill(is_dead, POISON) for values in (tokens, parents)]
    logits = logits.masked_fill(~is_visited[:, None], torch.nan)
    rows = rows.masked_fill(is_dead, POISON)
    actual = sample_and_walk(
        *poisoned, live, logits, rows, *sampling, uniforms, max_depth=max_depth
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("seed", range(4))
def test_top_k_1_degenerates_to_greedy_acceptance(seed):
    """Logits on a coarse grid: the argmax often ties, and the lowest token wins."""
    tree, (logits, rows), sampling, uniforms, max_depth = random_inputs(3, 20, 5, seed)
    logits = logits.round()
    sampling = sampling._replace(top_k=torch.ones_like(sampling.top_k))
    for use_top_k_top_p in (False, True):
        sampled = sample_and_walk(
            *tree, logits, rows, *sampling, uniforms,
            max_depth=max_depth, use_top_k_top_p=use_top_k_top_p,
        )  # fmt: skip
        predict = logits.max(dim=-1).indices[rows]
        assert_same(sampled, accept_greedy(*tree, predict, max_depth=max_depth))


@pytest.mark.parametrize("uniform", [0.0, LAST_UNIFORM])
def test_the_first_and_the_last_uniform_draw_survivors(uniform):
    logits = torch.tensor([[-torch.inf, 1.0, 0.5, -30.0, 2.0, -torch.inf]])
    node = torch.zeros((1, 1), dtype=torch.int64)
    given_uniform = torch.tensor([[uniform]], dtype=torch.float64)
    for top_k, last in ((1 << 30, 4), (2, 4), (4, 4)):
        sampling = (torch.ones(1), torch.tensor([top_k]), torch.ones(1), torch.zeros(1))
        walk = sample_and_walk(
            node, node - 1, torch.ones(1).long(), logits, node, *sampling, given_uniform,
            max_depth=0,
        )  # fmt: skip
        assert walk.emitted.tolist() == [[1 if uniform == 0.0 else last]]


def test_bfloat16_logits_are_filtered_in_float32():
    tree, (logits, rows), sampling, uniforms, max_depth = random_inputs(3, 7, 20, 0)
    low, full = (
        sample_and_walk(*tree, values, rows, *sampling, uniforms, max_depth=max_depth)
        for values in (logits.bfloat16(), logits.bfloat16().float())
    )
    assert_same(low, full)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("top_k", [1, 5, 1 << 30])
def test_a_row_of_nan_names_a_token(top_k):
    """Whatever it is: the next forward must be able to look it up."""
    node = torch.zeros((1, 1), dtype=torch.int64)
    sampling = (torch.ones(1), torch.tensor([top_k]), torch.tensor([0.9]), torch.zeros(1))
    walk = sample_and_walk(
        node, node - 1, torch.ones(1).long(), torch.full((1, 37), torch.nan), node, *sampling,
        torch.full((1, 1), 0.5), max_depth=0,
    )  # fmt: skip
    assert 0 <= int(walk.emitted) < 37


def test_no_requests():
    none, reals = torch.zeros((0, 5), dtype=torch.int64), torch.zeros(0)
    walk = sample_and_walk(
        none, none, none[:, 0], torch.zeros(3, 7), none, reals, none[:, 0], reals, reals,
        torch.zeros(0, 4), max_depth=3,
    )  # fmt: skip
    assert walk.emitted.shape == (0, 4)


@given(
    st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=30),
    st.floats(0.0, LAST_UNIFORM),
)
@settings(max_examples=60, deadline=None)
def test_inverse_cdf_equals_the_loop_and_never_draws_an_excluded_token(weights, uniform):
    probs = torch.tensor([weights])
    probs[0, len(weights) // 2] += 0.5
    for u in (0.0, uniform, LAST_UNIFORM):
        token = int(invert_cdf(probs, torch.tensor([u], dtype=torch.float64)))
        assert probs[0, token] > 0
        if u == 0.0:
            assert token == reference_invert_cdf(probs[0], u)
    # Away from the borders of the cells, which rounding may move, both agree.
    cdf = probs[0].double().cumsum(0)
    if (cdf - uniform * cdf[-1]).abs().min() > 1e-12:
        u = torch.tensor([uniform], dtype=torch.float64)
        assert int(invert_cdf(probs, u)) == reference_invert_cdf(probs[0], uniform)


def test_inverse_cdf_of_rows_of_more_than_a_block():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand((6, MAX_BLOCK + 1), generator=generator)
    probs[0, :MAX_BLOCK] = 0
    uniforms = torch.rand((6, 2), generator=generator)[:, 1]
    expected = [reference_invert_cdf(p, float(u)) for p, u in zip(probs, uniforms, strict=True)]
    assert invert_cdf(probs, uniforms).tolist() == expected
    assert expected[0] == MAX_BLOCK


def test_other_uniforms_are_noticed():
    """Control."""
    tree, logits, sampling, uniforms, max_depth = random_inputs(2, 9, 300, 0)
    sampling = sampling._replace(top_k=torch.full_like(sampling.top_k, 1 << 30))
    expected = reference(*tree, *logits, *sampling, uniforms, max_depth=max_depth)
    actual = sample_and_walk(*tree, *logits, *sampling, (uniforms + 0.5) % 1, max_depth=max_depth)
    assert not torch.equal(actual.emitted, expected.emitted)
