"""A tree that expands few nodes per depth."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from specstack_dsl.parts.base import MAX_DRAFT_BUDGET
from specstack_dsl.parts.tree_options import DeepTree


class Beam(DeepTree):
    """Options of the beam tree."""

    kind = "beam"
    summary = "Expands the best nodes of each depth and verifies the best of all (EAGLE-2)."
    implementation = "specstack.trees.beam:BeamBuilder"
    needs = frozenset({"drafts"})
    provides = frozenset({"paths", "branches"})

    width: int = Field(
        8, ge=1, le=256, description="Nodes expanded per depth, and most children of each"
    )

    @property
    def search(self) -> dict[str, Any]:
        """The beam."""
        return {"width": self.width, "frontier": self.width}

    @property
    def max_nodes(self) -> int | None:
        """One family at the root, one per node of the beam below."""
        total = self.width + (self.depth - 1) * self.width**2
        return total if total < MAX_DRAFT_BUDGET else None
