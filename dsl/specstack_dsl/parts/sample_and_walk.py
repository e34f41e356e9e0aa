"""Acceptance of what the target samples."""

from __future__ import annotations

from specstack_dsl.parts.base import VerifyPart


class SampleAndWalk(VerifyPart):
    """Has no options."""

    kind = "sample_and_walk"
    summary = "Samples the target at each node and follows the child it names; exact always."
    implementation = "specstack.verify.sample_and_walk:SampleAndWalkRule"
    needs = frozenset({"paths", "logits"})
