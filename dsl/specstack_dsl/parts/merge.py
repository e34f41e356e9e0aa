"""Drafts of several drafters in one tree."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, SerializeAsAny, field_validator

from specstack_dsl.parts.base import DrafterPart


class Merge(DrafterPart):
    """Options of the merge."""

    kind = "merge"
    summary = "The candidates of several drafters in one tree; duplicates count once."
    implementation = "specstack.drafters.merge:MergeDrafter"
    provides = frozenset({"drafts", "path_scores"})
    nested = "of"

    of: Annotated[tuple[SerializeAsAny[DrafterPart], ...], Field(strict=False)] = Field(
        min_length=2, max_length=8, description="Drafters, each as in the section itself"
    )

    @field_validator("of")
    @classmethod
    def _propose_by_themselves(cls, of: tuple[DrafterPart, ...]) -> tuple[DrafterPart, ...]:
        for index, member in enumerate(of):
            if member.members is not None or not member.implementation:
                raise ValueError(
                    f"of.{index} is {member.kind}: a merge takes drafters that propose themselves"
                )
        return of

    @property
    def members(self) -> tuple[DrafterPart, ...]:
        """The drafters that propose."""
        return self.of

    @property
    def options(self) -> dict[str, Any]:
        """Planning resolves the drafters one by one."""
        return {}
