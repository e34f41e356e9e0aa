"""Greedy acceptance in Triton: equals the loop, whatever dead nodes hold."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.accept_greedy import accept_greedy as reference
from specstack_kernels.testing import TREE_SHAPES, random_tree
from specstack_kernels.triton.accept_greedy import accept_greedy

SHAPES = [*TREE_SHAPES, (2, 100, 3), (1, 257, 4)]
IDS = ["B{}-N{}-V{}".format(*shape) for shape in SHAPES]
POISON = -0x5EADBEEF0BAD


def random_inputs(batch, nodes, vocab, seed):
    """Trees whose dead nodes carry tokens and predictions that would be accepted if alive."""
    tokens, parents, num_nodes, max_depth = random_tree(batch, nodes, vocab, seed)
    generator = torch.Generator().manual_seed(seed)
    predict = torch.randint(vocab, (batch, nodes), generator=generator)
    # Half of the nodes predict one of their children, so that paths get long.
    for b in range(batch):
        for node in range(1, int(num_nodes[b])):
            if torch.rand((), generator=generator) < 0.5:
                predict[b, parents[b, node]] = tokens[b, node]
    is_dead = torch.arange(nodes) >= num_nodes[:, None]
    tokens = torch.where(is_dead, predict[:, :1], tokens)
    return (tokens, parents, num_nodes, predict), is_dead, max_depth


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES, ids=IDS)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition(batch, nodes, vocab, seed):
    inputs, _, max_depth = random_inputs(batch, nodes, vocab, seed)
    for depth in {0, max_depth // 2, max_depth, max_depth + 3}:
        assert_same(accept_greedy(*inputs, max_depth=depth), reference(*inputs, max_depth=depth))


def test_dead_nodes_are_not_read():
    (tokens, parents, num_nodes, predict), is_dead, max_depth = random_inputs(4, 33, 3, 0)
    expected = reference(tokens, parents, num_nodes, predict, max_depth=max_depth)
    poisoned = [values.masked_fill(is_dead, POISON) for values in (tokens, parents, predict)]
    actual = accept_greedy(*poisoned[:2], num_nodes, poisoned[2], max_depth=max_depth)
    assert_same(actual, expected)


def test_a_chain_is_walked_to_its_end():
    nodes = 70
    tokens = torch.arange(nodes)[None]
    walk = accept_greedy(tokens, tokens - 1, torch.tensor([nodes]), tokens + 1, max_depth=nodes - 1)
    assert torch.equal(walk.accept_index, tokens)
    assert torch.equal(walk.emitted, tokens + 1)
    assert walk.accept_lens.tolist() == [nodes]


def test_views_are_read_as_they_are():
    inputs, _, max_depth = random_inputs(3, 33, 3, 1)
    narrow = [values[:, :20] if values.dim() == 2 else values.clamp(max=20) for values in inputs]
    assert_same(
        accept_greedy(*narrow, max_depth=max_depth),
        reference(*(values.contiguous() for values in narrow), max_depth=max_depth),
    )


def test_no_requests():
    none = torch.zeros((0, 5), dtype=torch.int64)
    walk = accept_greedy(none, none, none[:, 0], none, max_depth=3)
    assert walk.accept_index.shape == walk.emitted.shape == (0, 4)


def test_another_prediction_at_the_root_is_noticed():
    """Control."""
    inputs, _, max_depth = random_inputs(4, 33, 3, 0)
    expected = reference(*inputs, max_depth=max_depth)
    inputs[3][:, 0] += 1
    actual = accept_greedy(*inputs, max_depth=max_depth)
    assert not torch.equal(actual.emitted, expected.emitted)
    assert not torch.equal(actual.accept_lens, expected.accept_lens)
