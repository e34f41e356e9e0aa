"""Acceptance of what the target's argmax says."""

from __future__ import annotations

from specstack_dsl.parts.base import VerifyPart


class Greedy(VerifyPart):
    """Has no options."""

    kind = "greedy"
    summary = "Accepts drafts that equal the target's argmax; exact at temperature 0 only."
    implementation = "specstack.verify.greedy:GreedyRule"
    needs = frozenset({"paths", "logits"})
