"""`Pipeline`: what the user asked for, typed and frozen, independent of any model or machine.

A section that is left out takes its default here; a pipeline that states only its target drafts
with n-grams, because that drafter works with every target. Positions of what was written stay with
the pipeline, so that planning can say where a value came from.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from specstack_dsl.errors import Position
from specstack_dsl.messages import nearest
from specstack_dsl.parts import (
    CONTRACTS,
    SINGLE,
    BudgetPart,
    DrafterPart,
    Engine,
    Fixed,
    Metrics,
    Part,
    Row,
    Section,
    Table,
    Target,
    TreePart,
    VerifyPart,
    catalogue,
)

LANGUAGE_VERSION = 1
SECTIONS = ("target", *CONTRACTS, "engine", "metrics")
DEFAULT_KINDS = {"drafter": "ngram", "tree": "best_first", "verify": "sample_and_walk"}
DEFAULT_TABLE = ((4, 16), (16, 8), (64, 4))
"""(max_batch, draft_budget) of the budget that is taken when none is stated."""


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


def default_section(name: str, sections: Mapping[str, Section]) -> Section:
    """Return what a section that was left out means beside the sections before it."""
    if name in SINGLE:
        return SINGLE[name]()
    if name != "budget":
        return catalogue()[name][DEFAULT_KINDS[name]]()
    drafter, tree = sections["drafter"], sections["tree"]
    assert isinstance(drafter, Part)
    assert isinstance(tree, TreePart)
    if not drafter.implementation:
        return Fixed(draft_budget=0)
    most = tree.max_nodes
    return Table(
        rows=tuple(
            Row(max_batch=batch, draft_budget=budget if most is None else min(budget, most))
            for batch, budget in DEFAULT_TABLE
        )
    )
