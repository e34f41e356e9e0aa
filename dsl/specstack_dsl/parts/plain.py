"""No drafter: plain decoding."""

from __future__ import annotations

from specstack_dsl.parts.base import DrafterPart


class NoDrafter(DrafterPart):
    """Has no options."""

    kind = "none"
    summary = "Plain decoding: the baseline that speculation is measured against."
    implementation = ""
