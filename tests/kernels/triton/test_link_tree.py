"""Tree links in Triton: equal the loop, whatever the parents of dead nodes say."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.link_tree import link_tree as reference
from specstack_kernels.testing import TREE_SHAPES, random_tree
from specstack_kernels.torch_ops.link_tree import link_tree as torch_link_tree
from specstack_kernels.triton.link_tree import link_tree

SHAPES = [*TREE_SHAPES, (2, 129, 3), (1, 256, 5)]
IDS = ["B{}-N{}".format(*shape) for shape in SHAPES]
POISON = -0x5EADBEEF0BAD


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES, ids=IDS)
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(batch, nodes, vocab, seed):
    _, parents, num_nodes, max_depth = random_tree(batch, nodes, vocab, seed)
    actual = link_tree(parents, num_nodes, max_depth=max_depth)
    assert_same(actual, reference(parents, num_nodes, max_depth=max_depth))


def test_parents_of_dead_nodes_are_not_read():
    _, parents, num_nodes, max_depth = random_tree(4, 33, 3, 0)
    expected = reference(parents, num_nodes, max_depth=max_depth)
    is_dead = torch.arange(33) >= num_nodes[:, None]
    assert is_dead.any()
    parents = parents.masked_fill(is_dead, POISON)
    assert_same(link_tree(parents, num_nodes, max_depth=max_depth), expected)


@pytest.mark.parametrize("nodes", [300, 1024])
def test_wide_trees_equal_the_vectorised_twin(nodes):
    """The loop would take minutes; `torch_ops` is held to it elsewhere."""
    _, parents, num_nodes, max_depth = random_tree(2, nodes, 50, 0)
    actual = link_tree(parents, num_nodes, max_depth=max_depth)
    assert_same(actual, torch_link_tree(parents, num_nodes, max_depth=max_depth))


def test_a_chain_and_a_star():
    nodes = 65
    chain = torch.arange(nodes) - 1
    star = torch.where(torch.arange(nodes) == 0, -1, 0)
    linked = link_tree(torch.stack([chain, star]), torch.tensor([nodes] * 2), max_depth=nodes - 1)
    assert torch.equal(linked.depth[0], torch.arange(nodes))
    assert torch.equal(linked.tree_mask[0], torch.ones(nodes, nodes).tril() > 0)
    assert linked.retrieve_next_token[0].tolist() == [*range(1, nodes), -1]
    assert linked.retrieve_next_sibling[0].tolist() == [-1] * nodes
    assert linked.depth[1].tolist() == [0] + [1] * (nodes - 1)
    assert linked.retrieve_next_token[1].tolist() == [1] + [-1] * (nodes - 1)
    assert linked.retrieve_next_sibling[1].tolist() == [-1, *range(2, nodes), -1]


def test_views_are_read_as_they_are():
    _, parents, num_nodes, max_depth = random_tree(3, 33, 3, 1)
    narrow, num_nodes = parents[:, :20], num_nodes.clamp(max=20)
    actual = link_tree(narrow, num_nodes, max_depth=max_depth)
    assert_same(actual, reference(narrow.contiguous(), num_nodes, max_depth=max_depth))


def test_no_requests():
    none = torch.zeros((0, 5), dtype=torch.int64)
    assert link_tree(none, none[:, 0], max_depth=3).tree_mask.shape == (0, 5, 5)


def test_another_parent_is_noticed():
    """Control: every output says so."""
    _, parents, num_nodes, _ = random_tree(2, 33, 3, 0)
    before = link_tree(parents, num_nodes, max_depth=32)
    node = int((parents[0] > 0).nonzero()[0, 0])
    parents[0, node] = 0
    for a, b in zip(before, link_tree(parents, num_nodes, max_depth=32), strict=True):
        assert not torch.equal(a, b)
