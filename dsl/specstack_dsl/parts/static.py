"""A tree of one shape."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from specstack_dsl.parts.base import MAX_DRAFT_BUDGET, TreePart
from specstack_dsl.parts.tree_options import Calibration, Cost

Rank = Annotated[int, Field(ge=0, le=255)]
Path = Annotated[tuple[Rank, ...], Field(strict=False, min_length=1, max_length=256)]


class Static(TreePart):
    """Options of the static tree."""

    kind = "static"
    summary = "The same shape in every round, as a list of paths of ranks (Medusa, Sequoia)."
    implementation = "specstack.trees.static:StaticBuilder"
    needs = frozenset({"drafts"})
    provides = frozenset({"paths", "branches", "fixed_shape"})

    paths: Annotated[tuple[Path, ...], Field(strict=False)] = Field(
        min_length=1,
        max_length=MAX_DRAFT_BUDGET,
        description="Nodes, parents and better siblings first; [0, 1]: second child of the first",
    )

    calibration: Calibration = None
    cost: Cost = None

    @field_validator("paths")
    @classmethod
    def _leave_no_gap(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        known: set[tuple[int, ...]] = {()}
        for path in paths:
            if path in known:
                raise ValueError(f"{list(path)} is there twice")
            if path[:-1] not in known:
                raise ValueError(
                    f"{list(path)} comes before its parent: write {list(path[:-1])} first"
                )
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                better = [*path[:-1], path[-1] - 1]
                raise ValueError(
                    f"{list(path)} comes before its better sibling: write {better} first"
                )
            known.add(path)
        return paths

    @property
    def max_depth(self) -> int:
        """Of the longest path."""
        return max(map(len, self.paths))

    @property
    def search(self) -> dict[str, Any]:
        """The shape."""
        return {"paths": [list(path) for path in self.paths]}

    @property
    def max_nodes(self) -> int:
        """As many as are listed."""
        return len(self.paths)
