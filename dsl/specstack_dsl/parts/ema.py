"""The budget that follows a moving average of correct drafts."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from specstack_dsl.parts.base import MAX_DRAFT_BUDGET, BudgetPart
from specstack_dsl.parts.budget_options import rising

Rising = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    Field(strict=False, min_length=1, max_length=32),
    AfterValidator(rising),
]
Drafts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_DRAFT_BUDGET)], ...],
    Field(strict=False, min_length=1, max_length=32),
    AfterValidator(rising),
]


class Ema(BudgetPart):
    """Options of the moving average."""

    kind = "ema"
    summary = "More drafts while most are correct, fewer when not; knows no costs (SGLang)."
    implementation = "specstack.budget.ema:EmaPolicy"

    choices: Drafts = Field(description="Drafts per request and round to choose from, rising")
    max_batches: Rising = Field(
        (1, 8, 32), description="Largest batch of each size class; beyond: plain decoding"
    )
    room: float = Field(
        0.5, gt=0, le=1, strict=False, description="Share of correct drafts that asks for more"
    )
    hysteresis: float = Field(
        0.1, ge=0, strict=False, description="Correct drafts that the average must be beyond that"
    )

    @property
    def steps(self) -> tuple[tuple[int | None, int], ...]:
        """The largest choice, up to the last size class."""
        return ((self.max_batches[-1], max(self.choices)),)

    @property
    def draft_budgets(self) -> tuple[int, ...]:
        """The choices."""
        return self.choices
