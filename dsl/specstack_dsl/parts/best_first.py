"""A tree of the most probable paths."""

from __future__ import annotations

from pydantic import Field

from specstack_dsl.parts.base import MAX_DRAFT_BUDGET, TreePart


class BestFirst(TreePart):
    """Options of the best-first tree."""

    kind = "best_first"
    summary = "The nodes with the most probable paths, whatever shape that gives."
    implementation = "specstack.trees.best_first:BestFirstBuilder"
    needs = frozenset({"drafts"})
    provides = frozenset({"paths", "branches"})

    depth: int = Field(8, ge=1, le=256, description="Deepest node")
    width: int | None = Field(
        None, ge=1, le=256, description="Most children of a node; left out: no limit"
    )

    @property
    def max_nodes(self) -> int | None:
        """width + width^2 + ... up to depth; None from the largest budget on."""
        if self.width is None:
            return None
        total = 0
        for level in range(1, self.depth + 1):
            total += self.width**level
            if total >= MAX_DRAFT_BUDGET:
                return None
        return total
