"""A budget by batch size."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from specstack_dsl.parts.base import BudgetPart, DraftBudget, MinSurvival


class Row(BaseModel):
    """One row of the table."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_batch: int = Field(ge=1, description="Largest batch that this row holds for")
    draft_budget: DraftBudget = Field(
        description="Drafts per request and round, root excluded; 0: plain decoding"
    )
    min_survival: MinSurvival = Field(
        default=0.0, description="Least probability of being accepted that a draft is verified for"
    )


class Table(BudgetPart):
    """Options of the table."""

    kind = "table"
    summary = "Drafts by batch size: many when few requests run, none beyond the last row."
    implementation = "specstack.budget.table:TablePolicy"

    rows: Annotated[tuple[Row, ...], Field(strict=False)] = Field(
        min_length=1, description="Rows of max_batch and draft_budget, max_batch rising"
    )

    @field_validator("rows")
    @classmethod
    def _max_batch_rises(cls, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        for index, (one, following) in enumerate(pairwise(rows), start=1):
            if following.max_batch <= one.max_batch:
                raise ValueError(
                    f"max_batch must rise from row to row: row {index} has"
                    f" {following.max_batch} after {one.max_batch}"
                )
        return rows

    @property
    def steps(self) -> tuple[tuple[int | None, int], ...]:
        """One step per row."""
        return tuple((row.max_batch, row.draft_budget) for row in self.rows)
