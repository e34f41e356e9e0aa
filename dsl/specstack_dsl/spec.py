"""`Pipeline`: what the user asked for, typed and frozen, independent of any model or machine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from specstack_dsl.errors import Position
from specstack_dsl.messages import nearest
from specstack_dsl.parts import (
    BudgetPart,
    DrafterPart,
    Engine,
    Metrics,
    Target,
    TreePart,
    VerifyPart,
)


class Pipeline(BaseModel):
    """One serving pipeline as it was written, defaults filled in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    target: Target
    drafter: SerializeAsAny[DrafterPart]
    tree: SerializeAsAny[TreePart]
    verify: SerializeAsAny[VerifyPart]
    budget: SerializeAsAny[BudgetPart]
    engine: Engine
    metrics: Metrics
    positions: dict[str, Position] = Field(exclude=True, repr=False)
    """Place of every value that was written, by dotted path; the root is the empty path."""

    def states(self, path: str) -> bool:
        """Whether the text gives this value or section."""
        return path in self.positions

    def position(self, path: str) -> Position:
        """Place of a value, or of the innermost thing around it that was written."""
        return nearest(path, self.positions)

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        return bool(self.drafter.implementation)
