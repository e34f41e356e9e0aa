"""A tree of the most probable paths, each scored by its own tokens."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from specstack_dsl.parts.best_first import BestFirst


class PathConditional(BestFirst):
    """Options of the path-conditional tree."""

    kind = "path_conditional"
    summary = "best_first that insists on scores which depend on the path (corrector, refresh)."
    needs = frozenset({"drafts", "path_scores"})

    frontier: int | None = Field(
        None, ge=1, le=1024, description="Most nodes scored per depth; left out: the budget"
    )

    @property
    def search(self) -> dict[str, Any]:
        """The best paths through a bounded frontier."""
        return {"width": self.width, "frontier": self.frontier}

    @property
    def options(self) -> dict[str, Any]:
        """Without the frontier, which is the drafter's."""
        return {name: value for name, value in super().options.items() if name != "frontier"}
