"""Candidates from a head: the most probable paths, depth by depth, in fixed shapes.

A path is never less probable than its extensions, so every ancestor of one of the best N nodes is
one of the best N, too. Hence at each depth it is enough to keep the N best nodes by cumulative
log q and to expand those: the result holds the best N nodes of the whole trie (DDTree, arXiv
2604.12989, Prop. 1, for any law that factorises along paths). The path of the most probable child
each time is always kept, for chains. Letters: B requests, F frontier nodes of a depth, k children
of a node, W draft vocabulary, M candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.types import DraftProposal


@dataclass(frozen=True)
class Children:
    """The most probable children of each frontier node, best first."""

    tokens: Int[Tensor, "B F k"]
    """Target ids."""
    log_q: Float[Tensor, "B F k"]
    """Given the node."""


@dataclass(frozen=True)
class Frontier:
    """Nodes of one depth that were kept."""

    tokens: Int[Tensor, "B F"]
    parents: Int[Tensor, "B F"]
    """In the frontier of the depth before."""
    depth: int


class Expander(Protocol):
    """Gives the children of the frontier, depth by depth; it may keep state between calls."""

    def first(self) -> Children:
        """Children of the root, F = 1."""

    def next(self, frontier: Frontier) -> Children:
        """Children of the nodes that were kept of the last call's."""


def expand(expander: Expander, max_depth: int, draft_budget: int) -> DraftProposal:
    """Return a trie that holds the `draft_budget` most probable nodes up to `max_depth`.

    It is no deeper than the budget, as no tree of it could be.
    Host sync: none, unless the expander has one.
    """
    children = expander.first()
    above = children.log_q.new_zeros(children.log_q.shape[:2])  # cumulative log q, [B, F]
    tokens, parents, log_qs = [], [], []
    first_of_last = -1
    max_depth = min(max_depth, draft_budget)
    for depth in range(1, max_depth + 1):
        width = children.tokens.shape[2]
        paths = (above[..., None] + children.log_q).flatten(1)  # [B, F * k]
        chosen = _best(paths, draft_budget)
        frontier = Frontier(children.tokens.flatten(1).gather(1, chosen), chosen // width, depth)
        tokens.append(frontier.tokens)
        log_qs.append(children.log_q.flatten(1).gather(1, chosen))
        parents.append(frontier.parents + first_of_last)
        first_of_last = 0 if depth == 1 else first_of_last + above.shape[1]
        above = paths.gather(1, chosen)
        if depth < max_depth:
            children = expander.next(frontier)
    return DraftProposal(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(log_qs, 1))


def _best(paths: Float[Tensor, "B C"], num_kept: int) -> Int[Tensor, "B F"]:
    """The best child of the first node, which is the chain so far; then the best others."""
    ranking = paths.clone()
    ranking[:, 0] = torch.inf
    return ranking.topk(min(num_kept, paths.shape[1]), dim=1).indices


def top_children(
    log_q: Float[Tensor, "B F W"], token_ids: Int[Tensor, " W"] | None, width: int
) -> Children:
    """The best `width` tokens of each node; `token_ids` are their target ids (None: equal)."""
    best = log_q.topk(min(width, log_q.shape[-1]), dim=-1)
    tokens = best.indices if token_ids is None else token_ids[best.indices]
    return Children(tokens, best.values)
