"""Drafting depth by depth with a head that is fed its own hidden state."""

from __future__ import annotations

from specstack_dsl.parts.head import HeadPart


class Autoregressive(HeadPart):
    """Options of the autoregressive drafter."""

    kind = "autoregressive"
    summary = "A trained head that drafts depth by depth (EAGLE-3, MTP, KVShot)."
    implementation = "specstack.drafters.autoregressive:AutoregressiveDrafter"
