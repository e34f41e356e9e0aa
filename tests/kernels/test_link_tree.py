"""Tree links: the vectorised op equals the loop; mask and links follow from the parents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels import ops
from specstack_kernels.reference.link_tree import link_tree as reference
from specstack_kernels.testing import TREE_SHAPES, random_tree

SHAPES = [pytest.param(*s, id="B{}-N{}-V{}".format(*s)) for s in TREE_SHAPES]


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition(batch, nodes, vocab, seed):
    _, parents, num_nodes, max_depth = random_tree(batch, nodes, vocab, seed)
    actual = ops.link_tree(parents, num_nodes, max_depth=max_depth)
    for a, b in zip(actual, reference(parents, num_nodes, max_depth=max_depth), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@given(st.integers(1, 3), st.integers(1, 24), st.integers(2, 4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_mask_is_the_transitive_closure_and_links_list_all_children(batch, nodes, vocab, seed):
    _, parents, num_nodes, max_depth = random_tree(batch, nodes, vocab, seed)
    linked = ops.link_tree(parents, num_nodes, max_depth=max_depth)
    for b in range(batch):
        live = int(num_nodes[b])
        edges = torch.eye(nodes)
        for node in range(1, nodes):
            edges[node, int(parents[b, node]) if node < live else 0] = 1
        closure = torch.matrix_power(edges, nodes) > 0
        assert torch.equal(linked.tree_mask[b], closure)
        assert torch.equal(linked.depth[b], closure.sum(dim=1) - 1)
        for parent in range(nodes):
            children = []
            child = int(linked.retrieve_next_token[b, parent])
            while child != -1:
                children.append(child)
                child = int(linked.retrieve_next_sibling[b, child])
            expected = [n for n in range(1, live) if int(parents[b, n]) == parent]
            assert children == (expected if parent < live else [])


def test_max_depth_beyond_the_tree_changes_nothing():
    _, parents, num_nodes, max_depth = random_tree(3, 17, 3, 0)
    tight = ops.link_tree(parents, num_nodes, max_depth=max_depth)
    loose = ops.link_tree(parents, num_nodes, max_depth=100)
    for a, b in zip(tight, loose, strict=True):
        assert torch.equal(a, b)
