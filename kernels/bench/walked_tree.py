"""Trees of which a target accepts a chain, in our form and in that of SGLang's kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from specstack_kernels.torch_ops.link_tree import link_tree

CHAIN = 4
"""Correct drafts of every request: a walk visits CHAIN + 1 nodes."""


class WalkedTree(NamedTuple):
    """All nodes live. The first CHAIN drafts follow each other; the rest hangs below the root."""

    draft_tokens: Int[Tensor, "B N"]
    """Of node n: n."""
    parent_index: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]


def walked_tree(batch: int, nodes: int, device: torch.device) -> WalkedTree:
    """Return one tree `batch` times."""
    node = torch.arange(nodes, device=device)
    parent = torch.where(node <= CHAIN, node - 1, 0)
    return WalkedTree(
        node.repeat(batch, 1),
        parent.repeat(batch, 1),
        torch.full((batch,), nodes, device=device),
    )


def sglang_arguments(tree: WalkedTree) -> dict[str, Tensor]:
    """What SGLang's walks take: outputs, then the tree, under its names."""
    batch, nodes = tree.draft_tokens.shape
    device = tree.draft_tokens.device
    linked = link_tree(tree.parent_index, tree.num_nodes, max_depth=CHAIN)
    return {
        "predicts": torch.empty(batch * nodes, dtype=torch.int32, device=device),
        "accept_index": torch.full((batch, CHAIN + 1), -1, dtype=torch.int32, device=device),
        "accept_token_num": torch.empty(batch, dtype=torch.int32, device=device),
        "candidates": tree.draft_tokens,
        "retrive_index": torch.arange(batch * nodes, device=device).view(batch, nodes),
        "retrive_next_token": linked.retrieve_next_token,
        "retrive_next_sibling": linked.retrieve_next_sibling,
    }
