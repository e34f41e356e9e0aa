"""Depths, ancestor mask and first-child / next-sibling links of a tree: the definition.

Parents stand before children; nodes at or beyond `num_nodes` are dead: depth 1, they see the root
and themselves, and nothing links to them. Letters: B requests, N nodes.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from specstack_kernels.types import LinkedTree


def link_tree(
    parent_index: Int[Tensor, "B N"], num_nodes: Int[Tensor, " B"], *, max_depth: int
) -> LinkedTree:
    """Return what follows from the parents. No node may lie deeper than `max_depth`."""
    batch, nodes = parent_index.shape
    depth = torch.zeros_like(parent_index)
    tree_mask = torch.zeros((batch, nodes, nodes), dtype=torch.bool)
    next_token = torch.full_like(parent_index, -1)
    next_sibling = torch.full_like(parent_index, -1)
    for b in range(batch):
        tree_mask[b, 0, 0] = True
        for node in range(1, nodes):
            live = node < int(num_nodes[b])
            parent = int(parent_index[b, node]) if live else 0
            depth[b, node] = depth[b, parent] + 1
            assert depth[b, node] <= max_depth or not live
            tree_mask[b, node] = tree_mask[b, parent]
            tree_mask[b, node, node] = True
            if not live:
                continue
            if next_token[b, parent] == -1:
                next_token[b, parent] = node
            else:
                sibling = int(next_token[b, parent])
                while next_sibling[b, sibling] != -1:
                    sibling = int(next_sibling[b, sibling])
                next_sibling[b, sibling] = node
    return LinkedTree(depth, tree_mask, next_token, next_sibling)
