"""The budget with the most tokens per second that meets a latency target."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from specstack_dsl.parts.budget_options import ComparingBudget

Target = Annotated[float | None, Field(gt=0, strict=False)]


class Slo(ComparingBudget):
    """Options of the budget with targets."""

    kind = "slo"
    summary = "As goodput, among the choices that meet a time per token or to the first token."
    implementation = "specstack.budget.slo:SloPolicy"

    tpot_ms: Target = Field(
        None, description="Most milliseconds per output token of any request of the batch"
    )
    ttft_ms: Target = Field(
        None, description="Most milliseconds of a round while requests wait for their first token"
    )

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if self.tpot_ms is None and self.ttft_ms is None:
            raise ValueError("slo needs a target: state tpot_ms, ttft_ms or both")
        return self
