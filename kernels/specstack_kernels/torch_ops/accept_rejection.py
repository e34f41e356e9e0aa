"""Vectorised twin of `reference.accept_rejection`: offers the children of a node one by one.

A law has C candidates, and p changes at those alone: an offer moves [B, C] numbers, while the
[B, V] row of a visited node is filtered once, as in sampling, and summed once. What is left of p
and q is not divided by its sum but compared with it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.torch_ops.filter_probs import filter_probs
from specstack_kernels.torch_ops.sample_and_walk import invert_cdf
from specstack_kernels.torch_ops.walk import walk_tree
from specstack_kernels.types import Walk

LAST_UNIFORM = 1.0 - 2.0**-53


def accept_rejection(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    law_tokens: Int[Tensor, "B N C"],
    law_probs: Float[Tensor, "B N C"],
    logits: Float[Tensor, "T V"],
    logit_rows: Int[Tensor, "B N"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    uniforms: Float[Tensor, "B K"],
    *,
    max_depth: int,
    max_children: int,
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1. Host sync: none.

    Args:
        law_tokens: distinct in a node that has children, any ids below V in others.
        law_probs: q of each candidate; anything in nodes without children.
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first; no law and no uniform counts.
        max_children: most children that are offered at a node; 1 does for chains.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    nodes = draft_tokens.shape[1]
    index = torch.arange(nodes, device=draft_tokens.device)
    is_live = index < num_nodes[:, None]
    live_parent = parent_index.masked_fill(~is_live, -1)
    is_greedy = top_k == 1
    request = torch.arange(draft_tokens.shape[0], device=draft_tokens.device)

    def taken(step: int, node: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        visited = logits[logit_rows.gather(1, node[:, None])[:, 0]].float()  # [B, V]
        p = filter_probs(visited, temperature, top_k, top_p, min_p, use_top_k_top_p=use_top_k_top_p)
        offered = _take_token(
            p,
            law_tokens[request, node],
            law_probs[request, node].double(),
            draft_tokens,
            (live_parent == node[:, None]) & ~is_greedy[:, None],
            uniforms[:, step].double().clamp(max=LAST_UNIFORM),
            min(max_children, nodes - 1 - step),
        )
        return torch.where(is_greedy, visited.max(dim=-1).indices, offered)

    return walk_tree(draft_tokens, parent_index, num_nodes, taken, max_depth=max_depth)


def _take_token(
    probs: Float[Tensor, "B V"],
    candidates: Int[Tensor, "B C"],
    q: Float[Tensor, "B C"],
    draft_tokens: Int[Tensor, "B N"],
    is_waiting: Bool[Tensor, "B N"],
    uniform: Float[Tensor, " B"],
    max_children: int,
) -> Int[Tensor, " B"]:
    """Return the first child that is taken, or else a token of what is left of p.

    Args:
        probs: p; overwritten.
        is_waiting: the children of each request's node.
    """
    p = probs.gather(1, candidates).double()
    probs.scatter_(1, candidates, 0.0)
    outside = probs.sum(dim=1, dtype=torch.float64)  # what no draft can change
    taken = torch.full_like(draft_tokens[:, 0], -1)
    for _ in range(max_children):
        if _is_known_over(is_waiting):
            break
        child = is_waiting.to(torch.uint8).argmax(dim=1, keepdim=True)
        token = draft_tokens.gather(1, child)  # [B, 1]
        is_token = candidates == token
        is_offered = is_waiting.any(dim=1) & (q.masked_fill(~is_token, 0.0).sum(dim=1) > 0)
        p_sum, q_sum = outside + p.sum(dim=1), q.sum(dim=1)
        left = (p - q * (p_sum / q_sum)[:, None]).clamp(min=0)
        ratio = (p / p_sum[:, None]) / (q / q_sum[:, None])
        chance = ratio.masked_fill(~is_token, 0.0).sum(dim=1)
        chance = chance.masked_fill(outside + left.sum(dim=1) == 0, 1.0)
        is_taken = is_offered & (uniform < chance)
        is_refused = is_offered & ~is_taken
        remaining = ((uniform - chance) / (1 - chance)).clamp(max=LAST_UNIFORM)
        uniform = torch.where(is_refused, remaining, uniform)
        p = torch.where(is_refused[:, None], left, p)
        q = q.masked_fill(is_refused[:, None] & is_token, 0.0)
        taken = torch.where(is_taken, token[:, 0], taken)
        is_waiting = is_waiting.scatter(1, child, False) & ~is_taken[:, None]
    if _is_known_over(taken < 0):
        return taken
    drawn = invert_cdf(probs.double().scatter_(1, candidates, p), uniform)
    return torch.where(taken >= 0, taken, drawn)


def _is_known_over(is_open: Bool[Tensor, "*S"]) -> bool:
    """True if the host can see for free that nothing is left to decide: on the CPU only."""
    return is_open.device.type == "cpu" and not bool(is_open.any())
