"""Greedy acceptance: the vectorised op equals the loop, on links as on parents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specstack_kernels import ops
from specstack_kernels.reference.accept_greedy import accept_greedy as reference
from specstack_kernels.testing import TREE_SHAPES, random_tree

SHAPES = [pytest.param(*s, id="B{}-N{}-V{}".format(*s)) for s in TREE_SHAPES]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition(batch, nodes, vocab, seed):
    *tree, max_depth = random_tree(batch, nodes, vocab, seed)
    predict = torch.randint(
        vocab, (batch, nodes), generator=torch.Generator().manual_seed(seed), dtype=torch.int64
    )
    actual = ops.accept_greedy(*tree, predict, max_depth=max_depth)
    assert_same(actual, reference(*tree, predict, max_depth=max_depth))


@given(st.integers(1, 4), st.integers(1, 20), st.integers(2, 4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_walking_links_gives_the_same_path(batch, nodes, vocab, seed):
    tokens, parents, num_nodes, max_depth = random_tree(batch, nodes, vocab, seed)
    predict = torch.randint(vocab, (batch, nodes), generator=torch.Generator().manual_seed(seed))
    walk = ops.accept_greedy(tokens, parents, num_nodes, predict, max_depth=max_depth)
    linked = ops.link_tree(parents, num_nodes, max_depth=max_depth)
    for b in range(batch):
        path, node = [0], 0
        while True:
            child = int(linked.retrieve_next_token[b, node])
            while child != -1 and tokens[b, child] != predict[b, node]:
                child = int(linked.retrieve_next_sibling[b, child])
            if child == -1:
                break
            node = child
            path.append(node)
        assert walk.accept_index[b].tolist() == path + [-1] * (max_depth + 1 - len(path))
        assert int(walk.accept_lens[b]) == len(path)
        expected = [int(predict[b, node]) for node in path]
        assert walk.emitted[b].tolist() == expected + [0] * (max_depth + 1 - len(path))


def test_a_smaller_max_depth_cuts_the_walk():
    tokens = torch.tensor([[9, 1, 2, 3]])
    parents = torch.tensor([[-1, 0, 1, 2]])
    predict = torch.tensor([[1, 2, 3, 4]])
    walk = ops.accept_greedy(tokens, parents, torch.tensor([4]), predict, max_depth=1)
    assert walk.accept_index.tolist() == [[0, 1]]
    assert walk.emitted.tolist() == [[1, 2]]


class Operators(TorchDispatchMode):
    """Notes which ones run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("nodes", [1, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_walk_of_depth_0_is_the_root_and_looks_at_no_other_node(nodes, dtype):
    *tree, _ = random_tree(3, nodes, 2, 0)
    predict = torch.randint(2, (3, nodes), dtype=dtype)
    looked = []
    for max_depth in (0, 1):
        with Operators() as operators:
            walk = ops.accept_greedy(*tree, predict, max_depth=max_depth)
        assert_same(walk, reference(*tree, predict, max_depth=max_depth))
        looked.append("masked_fill" in operators.names)
    assert looked == [False, True]


def test_dead_nodes_are_never_accepted():
    tokens = torch.tensor([[9, 1, 1]])
    parents = torch.tensor([[-1, 0, 0]])
    predict = torch.tensor([[1, 1, 1]])
    walk = ops.accept_greedy(tokens, parents, torch.tensor([1]), predict, max_depth=1)
    assert walk.accept_lens.tolist() == [1]
    assert walk.emitted.tolist() == [[1, 0]]
