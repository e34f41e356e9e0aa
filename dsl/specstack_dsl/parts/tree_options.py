"""Options that several trees share: what drafts are worth, and what a round costs."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field

from specstack_dsl.parts.base import MAX_DRAFT_BUDGET, TreePart

Point = Annotated[
    tuple[
        Annotated[int, Field(ge=0, le=MAX_DRAFT_BUDGET)],
        Annotated[float, Field(gt=0, strict=False)],
    ],
    Field(strict=False),
]


def _rising(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if points[0][0] != 0:
        raise ValueError(f"the first point must be [0, milliseconds], got {list(points[0])}")
    for one, following in pairwise(points):
        if following[0] <= one[0]:
            raise ValueError(
                f"drafts must rise from point to point: {following[0]} comes after {one[0]}"
            )
        if following[1] < one[1]:
            raise ValueError(
                f"a round with more drafts is not faster: {following[1]:g} ms come after"
                f" {one[1]:g} ms"
            )
    return points


Calibration = Annotated[
    str | None,
    Field(min_length=1, description="File of `specstack draft calibrate`; left out: none"),
]
Cost = Annotated[
    Annotated[tuple[Point, ...], Field(strict=False, min_length=2), AfterValidator(_rising)] | None,
    Field(description="Points [drafts, ms of a round]: a tree ends where it stops paying"),
]


class DeepTree(TreePart):
    """A tree of some depth."""

    depth: int = Field(8, ge=1, le=256, description="Deepest node")
    calibration: Calibration = None
    cost: Cost = None

    @property
    def max_depth(self) -> int:
        """As stated."""
        return self.depth


def nodes_of(width: int | None, depth: int) -> int | None:
    """width + width^2 + ... up to depth; None from the largest budget on."""
    if width is None:
        return None
    total = 0
    for level in range(1, depth + 1):
        total += width**level
        if total >= MAX_DRAFT_BUDGET:
            return None
    return total
