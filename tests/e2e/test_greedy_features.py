"""Greedy answers of speculative servers equal plain decoding's, feature by feature."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cases import GREEDY, answers, continuations
from harness import Serve

SERVERS = {
    "tree": ("budget={kind: fixed, draft_budget: 15}",),
    "chain": ("tree={kind: chain, depth: 6}", "budget={kind: fixed, draft_budget: 6}"),
}


@pytest.fixture(scope="module", params=SERVERS)
def speculative(request: pytest.FixtureRequest, serve: Serve) -> dict[str, Any]:
    with serve("quickstart.yaml", *SERVERS[request.param]) as url:
        return {
            "answers": answers(url),
            "continuations": continuations(url, concurrency=1),
            "crowded": continuations(url, concurrency=8),
        }


@pytest.mark.parametrize("case", GREEDY)
def test_tokens_and_logprobs_equal_plain_decoding(
    case: str, plain: dict[str, Any], speculative: dict[str, Any]
) -> None:
    for name in (n for n in plain["answers"] if n.startswith(f"{case}/")):
        want, got = plain["answers"][name], speculative["answers"][name]
        assert got["text"] == want["text"]
        assert got["output_ids"] == want["output_ids"]
        for key in ("finish_reason", "completion_tokens", "prompt_tokens"):
            assert got["meta_info"][key] == want["meta_info"][key]
        assert_logprobs_equal(got["meta_info"], want["meta_info"])


def assert_logprobs_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    pairs = zip(got["output_token_logprobs"], want["output_token_logprobs"], strict=True)
    for (a, token_a, _), (b, token_b, _) in pairs:
        assert token_a == token_b
        assert a == pytest.approx(b, abs=1e-3)
    tops = zip(got["output_top_logprobs"], want["output_top_logprobs"], strict=True)
    for top_a, top_b in tops:
        assert [entry[0] for entry in top_a] == pytest.approx(
            [entry[0] for entry in top_b], abs=1e-3
        )


def test_the_prompt_set_is_identical_alone_and_crowded(
    plain: dict[str, Any], speculative: dict[str, Any]
) -> None:
    assert speculative["continuations"] == plain["continuations"]
    assert speculative["crowded"] == plain["continuations"]


def test_the_cases_do_what_they_are_there_for(plain: dict[str, Any]) -> None:
    """Control: a case that changes nothing would compare equal for the wrong reason."""
    texts = {name: answer["text"] for name, answer in plain["answers"].items()}
    changed = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
               "stop_string", "json_schema", "regex")  # fmt: skip
    for case in changed:
        assert any(
            texts[f"{case}/{key}"] != texts[f"plain/{key}"] for key in ("Repeat", "Write ")
        ), case
    for key in ("Repeat", "Write "):
        assert re.match(r"(red|green|blue)(, (red|green|blue)){3,8}", texts[f"regex/{key}"])
        reasons = plain["answers"][f"json_schema/{key}"]["meta_info"]["finish_reason"]
        if reasons["type"] == "stop":
            json.loads(texts[f"json_schema/{key}"])


def test_drafts_were_accepted(speculative: dict[str, Any]) -> None:
    meta = speculative["answers"]["plain/Repeat"]["meta_info"]
    assert meta["spec_verify_ct"] < 0.7 * meta["completion_tokens"]


def test_the_prompts_have_different_answers(plain: dict[str, Any]) -> None:
    """Control: equal outputs are not equal because all are."""
    outputs = plain["continuations"]
    assert len({tuple(ids) for ids in outputs}) == len(outputs)
