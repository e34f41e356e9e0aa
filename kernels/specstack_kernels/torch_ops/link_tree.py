"""Vectorised twin of `reference.link_tree`: climbs all nodes at once, one depth per step."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack_kernels.types import LinkedTree


def link_tree(
    parent_index: Int[Tensor, "B N"], num_nodes: Int[Tensor, " B"], *, max_depth: int
) -> LinkedTree:
    """Return what follows from the parents. No node may lie deeper than `max_depth`.

    Host sync: none.
    """
    batch, nodes = parent_index.shape
    index = torch.arange(nodes, device=parent_index.device)
    is_live = (index < num_nodes[:, None]) & (index > 0)  # [B, N], without the root
    parent = torch.where(is_live, parent_index, 0)
    climb = [index.expand(batch, nodes)]
    for _ in range(min(max(max_depth, 1), nodes - 1)):
        climb.append(parent.gather(1, climb[-1]))
    ancestors = torch.stack(climb, dim=-1)  # [B, N, depth + 1], the root repeats at the end
    tree_mask = torch.zeros((batch, nodes, nodes), dtype=torch.bool, device=index.device)
    tree_mask.scatter_(2, ancestors, True)
    live_parent = torch.where(is_live, parent_index, -2)
    is_child = live_parent[:, None, :] == index[:, None]  # [B, parent, child]
    is_sibling = (live_parent[:, None, :] == live_parent[:, :, None]) & is_live[:, :, None]
    is_later = index > index[:, None]
    return LinkedTree(
        depth=(ancestors != 0).sum(dim=-1),
        tree_mask=tree_mask,
        retrieve_next_token=_first_true(is_child),
        retrieve_next_sibling=_first_true(is_sibling & is_later),
    )


def _first_true(flags: Bool[Tensor, "B N N"]) -> Int[Tensor, "B N"]:
    """Return the first true column of each row, or -1."""
    return torch.where(flags.any(dim=-1), flags.to(torch.uint8).argmax(dim=-1), -1)
