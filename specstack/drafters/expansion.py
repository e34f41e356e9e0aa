"""Candidates from a head: paths of its own choice, depth by depth, in fixed shapes.

At each depth a `Search` keeps some children of the frontier and says which of them are expanded.
Letters: B requests, F frontier nodes of a depth, k children of a node, C candidates of a law,
M candidates of a proposal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.drafters.search import Search
from specstack.types import DraftLaw, DraftProposal


@dataclass(frozen=True)
class Children:
    """Children of each frontier node: the most probable, best first, or drawn, in that order."""

    tokens: Int[Tensor, "B F k"]
    """Target ids."""
    log_q: Float[Tensor, "B F k"]
    """Given the node."""
    law: DraftLaw | None = None
    """[B F C]: what they were drawn from."""


@dataclass(frozen=True)
class Frontier:
    """Nodes of one depth that are expanded."""

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


def expand(expander: Expander, search: Search, max_depth: int, draft_budget: int) -> DraftProposal:
    """Return the candidates that `search` keeps, up to `max_depth`.

    Host sync: none, unless the expander has one.
    """
    children = expander.first()
    above = children.log_q.new_zeros(children.log_q.shape[:2])  # cumulative log q, [B, F]
    frontier_at = torch.full_like(above, -1, dtype=torch.int64)  # as candidates
    tokens, parents, log_qs, laws = [], [], [], _Laws(children.law)
    max_depth = min(max_depth, search.depth(draft_budget))
    num_candidates = 0
    for depth in range(1, max_depth + 1):
        width = children.tokens.shape[2]
        paths = above[..., None] + children.log_q  # [B, F, k]
        kept = search.keep(paths, depth, draft_budget)
        if kept.children.shape[1] == 0:
            break
        above_of = kept.children // width
        tokens.append(children.tokens.flatten(1).gather(1, kept.children))
        log_qs.append(children.log_q.flatten(1).gather(1, kept.children))
        parents.append(frontier_at.gather(1, above_of))
        num_kept, expanded = kept.children.shape[1], slice(0, kept.num_expanded)
        if depth < max_depth:
            above = paths.flatten(1).gather(1, kept.children[:, expanded])
            places = torch.arange(kept.num_expanded, device=above.device) + num_candidates
            frontier_at = places.expand_as(above)
            frontier = Frontier(tokens[-1][:, expanded], above_of[:, expanded], depth)
            children = expander.next(frontier)
            laws.add(children.law, num_kept)
        num_candidates += num_kept
    return DraftProposal(
        torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(log_qs, 1),
        law=laws.of(num_candidates),
    )  # fmt: skip


class _Laws:
    """The laws of the root and all candidates."""

    def __init__(self, root: DraftLaw | None) -> None:
        self._found = [] if root is None else [root]

    def add(self, law: DraftLaw | None, num_candidates: int) -> None:
        """Those of the expanded candidates of a depth, which stand first in it."""
        if law is not None:
            self._found.append(law.padded(num_candidates))

    def of(self, num_candidates: int) -> DraftLaw | None:
        """All of them; the last depth has none."""
        if not self._found:
            return None
        tokens = torch.cat([law.tokens for law in self._found], dim=1)
        probs = torch.cat([law.probs for law in self._found], dim=1)
        return DraftLaw(tokens, probs).padded(1 + num_candidates)
