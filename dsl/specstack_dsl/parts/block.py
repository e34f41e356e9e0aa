"""Drafting all depths in one pass of a head."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specstack_dsl.parts.head import HeadPart


class Block(HeadPart):
    """Options of the block drafter."""

    kind = "block"
    summary = "A trained head that drafts a whole block in one pass (DFlash, JetFlow)."
    implementation = "specstack.drafters.block:BlockDrafter"
    statements = ("context", "draft_vocab", "mask", "conditioning", "block_size")

    candidates: int = Field(
        64, ge=1, le=4096, description="Tokens per depth that a corrector re-ranks"
    )
    mask: Literal["bidirectional", "tree_causal"] | None = Field(
        None, description="Who sees whom in a block; checked against the checkpoint"
    )
    conditioning: Literal["none", "markov", "gru", "refresh"] | None = Field(
        None,
        description="How a branch depends on its tokens; checked against the checkpoint, except"
        " none, which leaves out what it has",
    )
    block_size: int | None = Field(
        None, ge=2, description="Slots, anchor included; checked against the checkpoint"
    )

    @property
    def options(self) -> dict[str, Any]:
        """Whether the checkpoint's conditioning is used."""
        return {**super().options, "conditioned": self.conditioning != "none"}
