"""Vectorised twin of `reference.accept_block`: one node of every chain after the other.

A law has C candidates: k p - q is negative at none but those, so a node costs one filtered row of
[B, V], its sum, and [B, C] numbers. The row that the last token is drawn from is filtered once more
instead of keeping all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.torch_ops.filter_probs import filter_probs
from specstack_kernels.torch_ops.sample_and_walk import invert_cdf
from specstack_kernels.types import Walk

LAST_UNIFORM = 1.0 - 2.0**-53


def accept_block(
    draft_tokens: Int[Tensor, "B N"],
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
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted prefix of each chain; K = max_depth + 1. Host sync: none.

    Args:
        law_tokens: distinct in a node that has a child, any ids below V in others.
        law_probs: q of each candidate; anything in nodes without a child.
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first; no law and no uniform counts.
        uniforms: the first of each request counts.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    depth = min(max_depth, draft_tokens.shape[1] - 1)
    is_greedy = top_k == 1
    request = torch.arange(draft_tokens.shape[0], device=draft_tokens.device)

    def visit(node: Int[Tensor, " B"]) -> _Visit:
        visited = logits[logit_rows[request, node]].float()  # [B, V]
        p = filter_probs(visited, temperature, top_k, top_p, min_p, use_top_k_top_p=use_top_k_top_p)
        q = law_probs[request, node].double()
        return _visit(p, law_tokens[request, node], q, visited.max(dim=-1).indices)

    prefixes = _Prefixes(depth, request)
    for i in range(depth):
        has_draft = i + 1 < num_nodes
        if _is_known_over(prefixes.is_open & has_draft):
            break
        prefixes.extend(
            visit(torch.full_like(request, i)), draft_tokens[:, i + 1], has_draft, is_greedy
        )
    length, uniform = prefixes.longest(uniforms[:, 0].double(), is_greedy)
    last = visit(length)
    is_whole = length == prefixes.num_drafts
    drawn = invert_cdf(last.left(prefixes.kept.gather(1, length[:, None])[:, 0], is_whole), uniform)
    token = torch.where(is_greedy, last.best, drawn)
    return _walk(draft_tokens, length, token, max_depth)


class _Visit(NamedTuple):
    """A node of every chain: its two laws, p split into the candidates of q and the others."""

    candidates: Int[Tensor, "B C"]
    p: Float[Tensor, "B C"]
    q: Float[Tensor, "B C"]
    elsewhere: Float[Tensor, "B V"]
    """p where q has no candidate, else 0; not divided by the sum of p."""
    total: Float[Tensor, " B"]
    """That sum."""
    mass_elsewhere: Float[Tensor, " B"]
    best: Int[Tensor, " B"]
    """Argmax of the logits."""

    def left(self, kept: Float[Tensor, " B"], is_whole: Bool[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """(k p - q)+, or p after a whole chain and where nothing is left."""
        left = (kept[:, None] * self.p - self.q).clamp(min=0)
        is_plain = is_whole | (left.sum(dim=1) + kept * self.mass_elsewhere == 0)
        left = torch.where(is_plain[:, None], self.p, left)
        scale = torch.where(is_plain, 1.0, kept) / self.total
        return (self.elsewhere * scale[:, None]).scatter_(1, self.candidates, left)


def _visit(
    p: Float[Tensor, "B V"],
    candidates: Int[Tensor, "B C"],
    q: Float[Tensor, "B C"],
    best: Int[Tensor, " B"],
) -> _Visit:
    """Split the laws; `p` is overwritten."""
    inside = p.gather(1, candidates).double()
    elsewhere = p.scatter_(1, candidates, 0.0)
    mass = elsewhere.sum(dim=1, dtype=torch.float64)
    # At a node without a child candidates may repeat; its p is only drawn from, at any scale.
    total = mass + inside.sum(dim=1)
    return _Visit(
        candidates,
        inside / total[:, None],
        q / q.sum(dim=1, keepdim=True),
        elsewhere,
        total,
        mass / total,
        best,
    )


class _Prefixes:
    """How each prefix of the chains fares: k_i, h_i, and whether the chain goes on."""

    def __init__(self, depth: int, request: Int[Tensor, " B"]) -> None:
        shape = (request.shape[0], depth + 1)
        self.kept = torch.zeros(shape, dtype=torch.float64, device=request.device)
        self.kept[:, 0] = 1.0
        self.chance = torch.zeros_like(self.kept)
        """h_i, filled up to the last node visited; 1 or 0 for greedy requests."""
        self.is_open = torch.ones_like(request, dtype=torch.bool)
        """The chain goes on beyond the nodes visited, and its prefix may be accepted."""
        self.num_drafts = torch.zeros_like(request)
        """Length of the chain as far as it was visited."""
        self._depth = 0

    def extend(
        self,
        node: _Visit,
        draft: Int[Tensor, " B"],
        has_draft: Bool[Tensor, " B"],
        is_greedy: Bool[Tensor, " B"],
    ) -> None:
        """Visit the next node, whose child is `draft` where there is one."""
        i = self._depth
        kept = self.kept[:, i]
        is_draft = node.candidates == draft[:, None]
        q = node.q.masked_fill(~is_draft, 0.0).sum(dim=1)
        p = node.p.masked_fill(~is_draft, 0.0).sum(dim=1)
        is_on = self.is_open & has_draft & ((q > 0) | is_greedy)
        left = (kept[:, None] * node.p - node.q).clamp(min=0).sum(dim=1)
        left = left + kept * node.mass_elsewhere
        inner = torch.where(left > 0, left / (left + (1 - kept)), 0.0)
        self.chance[:, i] = torch.where(is_on, inner, self.chance[:, i])
        longer = torch.where(is_greedy, (draft == node.best).double(), (kept * p / q).clamp(max=1))
        longer = torch.where(is_on, longer, 0.0)
        self.kept[:, i + 1] = longer
        self.chance[:, i + 1] = longer
        self.num_drafts += is_on
        self.is_open = is_on & (longer > 0)
        self._depth = i + 1

    def longest(
        self, uniform: Float[Tensor, " B"], is_greedy: Bool[Tensor, " B"]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """Return the longest prefix that passes its test, and what is left of the uniforms."""
        uniform = uniform.clamp(max=LAST_UNIFORM)
        uniform = uniform.masked_fill(is_greedy, 0.0)  # passes at 1, fails at 0
        length = torch.zeros_like(self.num_drafts)
        is_found = torch.zeros_like(self.is_open)
        for i in range(self._depth, 0, -1):
            chance = torch.where(is_greedy, self.kept[:, i], self.chance[:, i])
            passes = uniform < chance
            length = torch.where(passes & ~is_found, i, length)
            remaining = torch.where(passes, uniform / chance, (uniform - chance) / (1 - chance))
            uniform = torch.where(is_found, uniform, remaining.clamp(max=LAST_UNIFORM))
            is_found = is_found | passes
        return length, uniform


def _walk(
    draft_tokens: Int[Tensor, "B N"],
    length: Int[Tensor, " B"],
    token: Int[Tensor, " B"],
    max_depth: int,
) -> Walk:
    """The path of `length` drafts and the token after it."""
    step = torch.arange(max_depth + 1, device=length.device)
    following = draft_tokens[:, (step + 1).clamp(max=draft_tokens.shape[1] - 1)]
    emitted = torch.where(step < length[:, None], following, 0)
    return Walk(
        accept_index=torch.where(step <= length[:, None], step, -1),
        accept_lens=length + 1,
        emitted=torch.where(step == length[:, None], token[:, None], emitted),
    )


def _is_known_over(is_open: Bool[Tensor, " B"]) -> bool:
    """True if the host can see for free that every chain has ended: on the CPU only."""
    return is_open.device.type == "cpu" and not bool(is_open.any())
