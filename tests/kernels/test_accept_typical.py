"""Typical acceptance: the vectorised op equals the loop, in slices as well."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.accept_typical import accept_typical as reference
from specstack_kernels.testing import TREE_SHAPES, random_sampling, random_tree
from specstack_kernels.torch_ops import accept_typical as module
from specstack_kernels.torch_ops.accept_greedy import accept_greedy
from specstack_kernels.torch_ops.accept_typical import accept_typical

SHAPES = [pytest.param(*s, id="B{}-N{}-V{}".format(*s)) for s in [*TREE_SHAPES, (3, 40, 17)]]
MEDUSA = {"epsilon": 0.09, "delta": 0.3}


def random_inputs(batch, nodes, vocab, seed):
    *tree, max_depth = random_tree(batch, nodes, vocab, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((batch * nodes, vocab), generator=generator) * 2
    rows = torch.randperm(batch * nodes, generator=generator).view(batch, nodes)
    uniforms = torch.rand((batch, max_depth + 1), generator=generator, dtype=torch.float64)
    return [*tree, logits, rows, *random_sampling(batch, vocab, seed), uniforms], max_depth


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.5, 1.0), (1.0, 0.6)])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition(batch, nodes, vocab, epsilon, delta, seed):
    inputs, max_depth = random_inputs(batch, nodes, vocab, seed)
    for depth in {max_depth, min(2, max_depth)}:
        options = {"max_depth": depth, "epsilon": epsilon, "delta": delta}
        assert_same(accept_typical(*inputs, **options), reference(*inputs, **options))


@pytest.mark.parametrize("limit", [1, 150, 1 << 20])
def test_slices_of_nodes_change_nothing(monkeypatch, limit):
    inputs, max_depth = random_inputs(4, 33, 3, 0)
    expected = accept_typical(*inputs, max_depth=max_depth, **MEDUSA)
    monkeypatch.setattr(module, "MAX_SLICE_NUMEL", limit)
    assert_same(accept_typical(*inputs, max_depth=max_depth, **MEDUSA), expected)


@pytest.mark.parametrize("seed", range(8))
def test_top_k_1_degenerates_to_greedy_acceptance(seed):
    inputs, max_depth = random_inputs(4, 33, 3, seed)
    tokens, parents, num_nodes, logits, rows, temperature, top_k, *rest = inputs
    tree = tokens, parents, num_nodes
    walk = accept_typical(
        *tree, logits, rows, temperature, torch.ones_like(top_k), *rest,
        max_depth=max_depth, **MEDUSA,
    )  # fmt: skip
    assert_same(walk, accept_greedy(*tree, logits.argmax(dim=-1)[rows], max_depth=max_depth))


@pytest.mark.parametrize("op", [accept_typical, reference])
def test_epsilon_0_accepts_the_deepest_path_first_in_node_order(op):
    """Nodes 3 and 4 are as deep as node 5, which stands behind them."""
    settings = [torch.tensor([x]) for x in (1.0, 1 << 30, 1.0, 0.0)]
    walk = op(
        torch.tensor([[0, 1, 2, 3, 4, 5]]),
        torch.tensor([[-1, 0, 0, 2, 1, 1]]),
        torch.tensor([6]),
        torch.zeros((6, 6)),
        torch.arange(6)[None],
        *settings,
        torch.full((1, 3), 0.99, dtype=torch.float64),
        max_depth=2,
        epsilon=0.0,
        delta=0.3,
    )
    assert walk.accept_index.tolist() == [[0, 2, 3]]
    assert walk.emitted.tolist() == [[2, 3, 5]]


@pytest.mark.parametrize("op", [accept_typical, reference])
def test_dead_nodes_are_never_accepted(op):
    inputs, max_depth = random_inputs(4, 33, 3, 0)
    inputs[2] = torch.ones_like(inputs[2])
    walk = op(*inputs, max_depth=max_depth, epsilon=0.0, delta=0.0)
    assert walk.accept_lens.tolist() == [1] * 4
