"""Vectorised twin of `reference.accept_typical`: judges all nodes, then climbs depth by depth.

Every node may be on the deepest path, so every node's [V] row is filtered, in slices of nodes that
bound the memory.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.torch_ops.filter_probs import filter_probs
from specstack_kernels.torch_ops.sample_and_walk import invert_cdf
from specstack_kernels.types import Walk

MAX_SLICE_NUMEL = 1 << 26
"""Numbers of p that are held at once: 256 MiB."""


def accept_typical(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    logits: Float[Tensor, "T V"],
    logit_rows: Int[Tensor, "B N"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    uniforms: Float[Tensor, "B K"],
    *,
    max_depth: int,
    epsilon: float,
    delta: float,
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1. Host sync: none.

    Args:
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: drafts that are the argmax of the logits, lowest id first, no others.
        uniforms: that of the depth of a path's end draws the token there.
        epsilon: a draft at least this probable is typical. 0: every draft is.
        delta: so is one of at least this share of exp(-H).
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    settings = (temperature, top_k, top_p, min_p)
    index = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    is_draft = (index > 0) & (index < num_nodes[:, None])
    parent = parent_index.clamp(min=0)
    is_typical = is_draft & _typical(
        draft_tokens, logits, logit_rows.gather(1, parent), settings, epsilon, delta,
        use_top_k_top_p,
    )  # fmt: skip
    is_reached = (index == 0).expand_as(is_typical)
    end = torch.zeros_like(num_nodes)
    length = torch.zeros_like(num_nodes)
    for _ in range(max_depth):
        is_reached = is_typical & is_reached.gather(1, parent)
        has_any = is_reached.any(dim=1)
        end = torch.where(has_any, is_reached.to(torch.uint8).argmax(dim=1), end)
        length = length + has_any
        if _is_known_over(is_reached):
            break
    visited = logits[logit_rows.gather(1, end[:, None])[:, 0]].float()  # [B, V]
    p = filter_probs(visited, *settings, use_top_k_top_p=use_top_k_top_p)
    drawn = invert_cdf(p, uniforms.gather(1, length[:, None])[:, 0])
    token = torch.where(top_k == 1, visited.max(dim=-1).indices, drawn)
    return _walk(draft_tokens, parent, end, length, token, max_depth)


def _typical(
    draft_tokens: Int[Tensor, "B N"],
    logits: Float[Tensor, "T V"],
    parent_rows: Int[Tensor, "B N"],
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    epsilon: float,
    delta: float,
    use_top_k_top_p: bool,
) -> Bool[Tensor, "B N"]:
    """Whether each draft is typical at its parent, or its argmax if the request is greedy."""
    batch, nodes = draft_tokens.shape
    is_greedy = (settings[1] == 1)[:, None]
    step = max(1, MAX_SLICE_NUMEL // (batch * logits.shape[1]))
    found = []
    for first in range(0, nodes, step):
        tokens = draft_tokens[:, first : first + step]
        visited = logits[parent_rows[:, first : first + step].flatten()].float()  # [B * n, V]
        each = [setting.repeat_interleave(tokens.shape[1]) for setting in settings]
        p = filter_probs(visited, *each, use_top_k_top_p=use_top_k_top_p)
        entropy = torch.special.entr(p).sum(dim=1, dtype=torch.float64)
        least = (delta * torch.exp(-entropy)).clamp(max=epsilon)
        chance = p.gather(1, tokens.flatten()[:, None])[:, 0]
        is_typical = (chance >= least).view(tokens.shape)
        is_best = tokens == visited.max(dim=-1).indices.view(tokens.shape)
        found.append(torch.where(is_greedy, is_best, is_typical))
    return torch.cat(found, dim=1)


def _walk(
    draft_tokens: Int[Tensor, "B N"],
    parent: Int[Tensor, "B N"],
    end: Int[Tensor, " B"],
    length: Int[Tensor, " B"],
    token: Int[Tensor, " B"],
    max_depth: int,
) -> Walk:
    """The path from the root to `end`, at depth `length`, and the token there."""
    accept_index = torch.full_like(end[:, None].expand(-1, max_depth + 1), -1)
    emitted = torch.zeros_like(accept_index)
    node, following = end, token
    for depth in range(max_depth, -1, -1):
        is_on = depth <= length
        accept_index[:, depth] = torch.where(is_on, node, -1)
        emitted[:, depth] = torch.where(is_on, following, 0)
        following = torch.where(is_on, draft_tokens.gather(1, node[:, None])[:, 0], following)
        node = torch.where(is_on, parent.gather(1, node[:, None])[:, 0], node)
    return Walk(accept_index, length + 1, emitted)


def _is_known_over(is_reached: Bool[Tensor, "B N"]) -> bool:
    """True if the host can see for free that no path goes on: on the CPU only."""
    return is_reached.device.type == "cpu" and not bool(is_reached.any())
