"""Drafting with a trained head: what both forms of heads have in common.

A checkpoint says itself what it is. What a pipeline states of that is checked against it, so that
a file can say what its author relies on; it changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from specstack_dsl.parts.base import DrafterPart
from specstack_dsl.parts.target import model_name


class HeadPart(DrafterPart):
    """Options of a drafter with a checkpoint."""

    needs = frozenset({"target_features"})
    provides = frozenset({"drafts", "path_scores"})
    statements: ClassVar[tuple[str, ...]] = ("context", "draft_vocab")
    """Options that state what the checkpoint is."""

    checkpoint: Annotated[str, AfterValidator(model_name)] = Field(
        description="The head: local folder (./ or /), Hugging Face id, or packaged:NAME"
    )
    width: int | None = Field(
        None, ge=1, le=256, description="Most children proposed per node; left out: the tree's"
    )
    drafts: Literal["best", "drawn"] = Field(
        "best", description="The most probable ones, or drawn at random, for rejection and block"
    )
    context: Literal["hidden", "kv", "hybrid"] | None = Field(
        None, description="What the head reads of the target; checked against the checkpoint"
    )
    draft_vocab: int | None = Field(
        None, ge=1, description="Tokens that can be drafted; checked against the checkpoint"
    )

    @property
    def provided(self) -> frozenset[str]:
        """Drawn drafts come with the law that they were drawn from."""
        return self.provides | ({"draft_law"} if self.drafts == "drawn" else set())

    @property
    def options(self) -> dict[str, Any]:
        """Without the statements, which planning checks."""
        return {k: v for k, v in super().options.items() if k not in self.statements}
