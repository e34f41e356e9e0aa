"""A tree without branches."""

from __future__ import annotations

from pydantic import Field

from specstack_dsl.parts.base import TreePart


class Chain(TreePart):
    """Options of the chain."""

    kind = "chain"
    summary = "One path: the best candidate at every depth."
    implementation = "specstack.trees.chain:ChainBuilder"
    needs = frozenset({"drafts"})
    provides = frozenset({"paths"})

    depth: int = Field(8, ge=1, le=256, description="Drafts on the path")

    @property
    def max_nodes(self) -> int:
        """One node per depth."""
        return self.depth
