"""A tree without branches."""

from __future__ import annotations

from typing import Any

from specstack_dsl.parts.tree_options import DeepTree


class Chain(DeepTree):
    """Options of the chain."""

    kind = "chain"
    summary = "One path: the best candidate at every depth."
    implementation = "specstack.trees.chain:ChainBuilder"
    needs = frozenset({"drafts"})
    provides = frozenset({"paths", "chain", "fixed_shape"})

    @property
    def search(self) -> dict[str, Any]:
        """One child per node."""
        return {"width": 1}

    @property
    def max_nodes(self) -> int:
        """One node per depth."""
        return self.depth
