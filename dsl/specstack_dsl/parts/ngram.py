"""Drafting from earlier occurrences of the last tokens, in the request or in a shared store."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from specstack_dsl.parts.base import DrafterPart


class Ngram(DrafterPart):
    """Options of the n-gram drafter."""

    kind = "ngram"
    summary = "Continues as the text did before: no draft model, no training, any target."
    implementation = "specstack.drafters.ngram:NgramDrafter"
    needs = frozenset({"tokens"})
    provides = frozenset({"drafts", "path_scores"})

    min_match: int = Field(2, ge=1, le=64, description="Fewest last tokens that must recur")
    max_match: int = Field(16, ge=1, le=64, description="Most last tokens that are looked up")
    max_occurrences: int = Field(
        16, ge=1, le=256, description="Most earlier occurrences that are followed"
    )
    shared_tokens: int = Field(
        0, ge=0, description="Tokens kept in a store shared between requests; 0: none"
    )

    @field_validator("max_match")
    @classmethod
    def _at_least_min_match(cls, value: int, info: ValidationInfo) -> int:
        shortest = info.data.get("min_match", 1)
        if value < shortest:
            raise ValueError(f"max_match {value} is below min_match {shortest}: raise it")
        return value
