"""Acceptance of what the target finds likely enough."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from specstack_dsl.parts.base import VerifyPart


class Typical(VerifyPart):
    """Options of typical acceptance."""

    kind = "typical"
    summary = "Accepts drafts that the target finds likely enough; changes what is sampled."
    implementation = "specstack.verify.typical:TypicalRule"
    needs = frozenset({"paths", "logits"})

    lossy: bool = Field(
        False,
        description="Must be true: says that the output may differ from the target's",
        json_schema_extra={"const": True},
    )
    epsilon: float = Field(
        0.09, gt=0, le=1, strict=False, description="A draft at least this probable is accepted"
    )
    delta: float = Field(
        0.3,
        gt=0,
        le=1,
        strict=False,
        description="So is one above this share of exp(-entropy) of the target's distribution",
    )

    @field_validator("lossy")
    @classmethod
    def _is_wanted(cls, value: bool) -> bool:
        if not value:
            raise ValueError(
                "typical acceptance changes the output's distribution: write `lossy: true` to"
                " accept that, or use verify sample_and_walk, which is exact"
            )
        return value

    @property
    def options(self) -> dict[str, Any]:
        """Without the consent."""
        return {name: value for name, value in super().options.items() if name != "lossy"}
