"""A tree of the most probable paths."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from specstack_dsl.parts.tree_options import DeepTree, nodes_of


class BestFirst(DeepTree):
    """Options of the best-first tree."""

    kind = "best_first"
    summary = "The nodes with the most probable paths, whatever shape that gives (DDTree)."
    implementation = "specstack.trees.best_first:BestFirstBuilder"
    needs = frozenset({"drafts"})
    provides = frozenset({"paths", "branches"})

    width: int | None = Field(
        None, ge=1, le=256, description="Most children of a node; left out: no limit"
    )

    @property
    def search(self) -> dict[str, Any]:
        """The best paths."""
        return {"width": self.width}

    @property
    def max_nodes(self) -> int | None:
        """Of full families at every depth."""
        return nodes_of(self.width, self.depth)
