"""The walk that every acceptance rule shares: choose a token, follow the child that carries it.

Children are found by comparing parents and tokens of all N nodes at once, which costs one small
[B, N] step per depth whatever the tree's width. Letters: B requests, N nodes, K path width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack_kernels.types import Walk

ChooseToken = Callable[[int, Int[Tensor, " B"]], Int[Tensor, " B"]]
"""(step, current node) -> the target's token there."""


def walk_tree(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choose_token: ChooseToken,
    *,
    max_depth: int,
) -> Walk:
    """Walk all requests depth by depth. Host sync: none."""
    batch, nodes = draft_tokens.shape
    device = draft_tokens.device
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    if max_depth == 0:
        token = choose_token(0, node).to(torch.int64)
        return Walk(node[:, None], torch.ones_like(node), token[:, None])
    is_live = torch.arange(nodes, device=device) < num_nodes[:, None]  # [B, N]
    live_parent = parent_index.masked_fill(~is_live, -1)
    is_active = torch.ones(batch, dtype=torch.bool, device=device)
    accept_index = torch.full((batch, max_depth + 1), -1, dtype=torch.int64, device=device)
    emitted = torch.zeros((batch, max_depth + 1), dtype=torch.int64, device=device)
    accept_lens = torch.zeros(batch, dtype=torch.int64, device=device)
    for step in range(max_depth + 1):
        token = choose_token(step, node)
        accept_index[:, step] = torch.where(is_active, node, -1)
        emitted[:, step] = torch.where(is_active, token, 0)
        accept_lens += is_active
        if step == max_depth:
            break
        is_match = (live_parent == node[:, None]) & (draft_tokens == token[:, None])
        is_active = is_active & is_match.any(dim=1)
        node = torch.where(is_active, is_match.to(torch.uint8).argmax(dim=1), node)
        if _is_known_over(is_active):
            break
    return Walk(accept_index, accept_lens, emitted)


def _is_known_over(is_active: Bool[Tensor, " B"]) -> bool:
    """True if the host can see for free that every request has stopped: on the CPU only."""
    return is_active.device.type == "cpu" and not bool(is_active.any())
