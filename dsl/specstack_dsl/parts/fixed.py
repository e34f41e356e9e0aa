"""The same budget at every load."""

from __future__ import annotations

from pydantic import Field

from specstack_dsl.parts.base import BudgetPart, DraftBudget, MinSurvival


class Fixed(BudgetPart):
    """Options of the fixed budget."""

    kind = "fixed"
    summary = "The same number of drafts at every load."
    implementation = "specstack.budget.fixed:FixedPolicy"

    draft_budget: DraftBudget = Field(
        description="Drafts per request and round, root excluded; 0: plain decoding"
    )
    min_survival: MinSurvival = Field(
        default=0.0, description="Least probability of being accepted that a draft is verified for"
    )

    @property
    def steps(self) -> tuple[tuple[int | None, int], ...]:
        """One step for all batches."""
        return ((None, self.draft_budget),)
