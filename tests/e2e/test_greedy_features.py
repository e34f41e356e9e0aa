"""Greedy answers of speculative servers equal plain decoding's, feature by feature.

The plain server schedules synchronously: with overlap, the engine counts penalties a token late.
"""

from __future__ import annotations

from typing import Any

import pytest
from cases import GREEDY, answers
from harness import Serve

from specstack_serving.lossless import PLAIN


@pytest.fixture(scope="session")
def plain_answers(serve: Serve) -> dict[str, Any]:
    with serve("quickstart.yaml", *PLAIN, "engine.args.disable_overlap_schedule=true") as url:
        return answers(url)


SERVERS = {
    "tree": ("quickstart.yaml", "budget={kind: fixed, draft_budget: 15}"),
    "chain": (
        "quickstart.yaml",
        "tree={kind: chain, depth: 6}",
        "budget={kind: fixed, draft_budget: 6}",
    ),
}


@pytest.fixture(scope="session", params=SERVERS)
def speculative_answers(request: pytest.FixtureRequest, serve: Serve) -> dict[str, Any]:
    spec, *overrides = SERVERS[request.param]
    with serve(spec, *overrides) as url:
        return answers(url)


@pytest.mark.parametrize("case", GREEDY)
def test_tokens_and_logprobs_equal_plain_decoding(
    case: str, plain_answers: dict[str, Any], speculative_answers: dict[str, Any]
) -> None:
    for name in (n for n in plain_answers if n.startswith(f"{case}/")):
        plain, ours = plain_answers[name], speculative_answers[name]
        assert ours["text"] == plain["text"]
        assert ours["output_ids"] == plain["output_ids"]
        for key in ("finish_reason", "completion_tokens"):
            assert ours["meta_info"][key] == plain["meta_info"][key]
        assert_logprobs_equal(ours["meta_info"], plain["meta_info"])


def assert_logprobs_equal(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    pairs = zip(ours["output_token_logprobs"], plain["output_token_logprobs"], strict=True)
    for (a, token_a, _), (b, token_b, _) in pairs:
        assert token_a == token_b
        assert a == pytest.approx(b, abs=1e-3)
    tops = zip(ours["output_top_logprobs"], plain["output_top_logprobs"], strict=True)
    for top_a, top_b in tops:
        assert [entry[0] for entry in top_a] == pytest.approx(
            [entry[0] for entry in top_b], abs=1e-3
        )


def test_the_speculative_server_accepted_drafts(speculative_answers: dict[str, Any]) -> None:
    meta = speculative_answers["plain/Repeat"]["meta_info"]
    assert meta["spec_verify_ct"] < 0.7 * meta["completion_tokens"]
