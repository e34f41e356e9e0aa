"""A tree of whole families."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from specstack_dsl.parts.tree_options import DeepTree, nodes_of


class Expand(DeepTree):
    """Options of the expanding tree."""

    kind = "expand"
    summary = "Appends all children of the best node, again and again (JetFlow's Algorithm 1)."
    implementation = "specstack.trees.expand:ExpandBuilder"
    needs = frozenset({"drafts"})
    provides = frozenset({"paths", "branches"})

    width: int = Field(7, ge=1, le=256, description="Children of every expanded node")

    @property
    def search(self) -> dict[str, Any]:
        """Whole families."""
        return {"width": self.width, "families": True}

    @property
    def max_nodes(self) -> int | None:
        """Of full families at every depth."""
        return nodes_of(self.width, self.depth)
