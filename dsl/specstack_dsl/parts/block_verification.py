"""Acceptance of drawn chains as a whole."""

from __future__ import annotations

from specstack_dsl.parts.base import VerifyPart


class BlockVerification(VerifyPart):
    """Has no options."""

    kind = "block"
    summary = "Judges a chain of drafts drawn at random as a whole; exact always."
    implementation = "specstack.verify.block:BlockRule"
    needs = frozenset({"paths", "logits", "draft_law", "chain"})
