"""Acceptance of drawn drafts one after the other."""

from __future__ import annotations

from specstack_dsl.parts.base import VerifyPart


class Rejection(VerifyPart):
    """Has no options."""

    kind = "rejection"
    summary = "Offers drafts drawn at random to the target one by one; exact always."
    implementation = "specstack.verify.rejection:RejectionRule"
    needs = frozenset({"paths", "logits", "draft_law", "fixed_shape"})
