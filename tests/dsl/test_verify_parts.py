"""Verification rules in a pipeline: consent to loss, and no price on drawn drafts."""

from __future__ import annotations

import pytest

from specstack_dsl import SpecError, loads

HEAD = "version: 1\ntarget: org/model\n"
DRAWN = "drafter: {kind: block, checkpoint: ./head, drafts: drawn}\ntree: chain\n"
PRICED = "budget: {kind: fixed, draft_budget: 4, min_survival: 0.1}\n"


def test_consent_is_no_option_of_the_rule() -> None:
    verify = loads(HEAD + "verify: {kind: typical, lossy: true, epsilon: 0.5}\n").verify
    assert verify.options == {"epsilon": 0.5, "delta": 0.3}


@pytest.mark.parametrize("kind", ["rejection", "block", "sample_and_walk", "greedy"])
def test_drawn_drafts_have_no_price(kind: str) -> None:
    loads(HEAD + DRAWN + f"verify: {kind}\n" + PRICED.replace("0.1", "0"))
    with pytest.raises(SpecError, match=r"budget\.min_survival: would drop drawn drafts"):
        loads(HEAD + DRAWN + f"verify: {kind}\n" + PRICED)


def test_other_drafts_may_have_one() -> None:
    loads(HEAD + "verify: sample_and_walk\n" + PRICED)
    loads(HEAD + "verify: {kind: typical, lossy: true}\n" + PRICED)
