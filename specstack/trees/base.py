"""The contract of a tree builder: choose the nodes that the target verifies."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Int
from torch import Tensor

from specstack.types import DraftProposal, DraftTree


class TreeBuilder(Protocol):
    """Builds one tree per request from the candidates of a round."""

    depth: int
    """No node stands deeper than this; the root has depth 0."""

    def build(
        self,
        proposal: DraftProposal,
        bonus_tokens: Int[Tensor, " B"],
        draft_budget: int,
        min_survival: float = 0.0,
        max_drafts: Int[Tensor, " B"] | None = None,
    ) -> DraftTree:
        """Return trees of N = draft_budget + 1 nodes, parents before children. Host sync: none.

        Args:
            min_survival: nodes whose path is less likely than this are dead.
            max_drafts: per request, where some may have fewer than `draft_budget`.
        """
