"""Options of budgets that compare choices by what rounds cost."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field

from specstack_dsl.parts.base import BudgetPart, DraftBudget


def rising(choices: tuple[int, ...]) -> tuple[int, ...]:
    """Check that choices rise; raises ValueError."""
    for one, following in pairwise(choices):
        if following <= one:
            raise ValueError(f"choices must rise: {following} comes after {one}")
    return choices


def _from_plain_decoding(choices: tuple[int, ...]) -> tuple[int, ...]:
    if choices[0] != 0:
        raise ValueError(
            f"choices must begin with 0, plain decoding: it is the bar for the others, got"
            f" {choices[0]}"
        )
    return rising(choices)


Choices = Annotated[
    tuple[DraftBudget, ...],
    Field(strict=False, min_length=2, max_length=32),
    AfterValidator(_from_plain_decoding),
]


class ComparingBudget(BudgetPart):
    """A budget that takes the choice with the most tokens per second."""

    choices: Choices = Field(description="Drafts per request and round to choose from, 0 first")
    prices: bool = Field(
        True, description="Whether drafts must be worth a price that it sets; false for drawn ones"
    )
    dwell_rounds: int = Field(
        8, ge=0, description="Rounds that a choice is kept, unless much is gained or load changes"
    )
    hysteresis: float = Field(
        0.03, ge=0, lt=1, strict=False, description="Share that another choice must be better by"
    )
    max_context: int | None = Field(
        None, ge=1, description="Longer requests do not draft; left out: no limit"
    )
    costs: str = Field(
        "auto", min_length=1, description="File of round times; auto: what was measured here"
    )

    @property
    def steps(self) -> tuple[tuple[int | None, int], ...]:
        """The largest choice, at any batch."""
        return ((None, max(self.choices)),)

    @property
    def draft_budgets(self) -> tuple[int, ...]:
        """The choices."""
        return self.choices

    @property
    def prices_drafts(self) -> bool:
        """As stated."""
        return self.prices
