"""A random two-layer target: two ranks, sampled laws, the context limit. Fast to run many times."""

from __future__ import annotations

import collections
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Serve
from laws import same_law

from specstack.applications import PLAIN_OVERRIDES

VOCAB = 64
PROMPTS = [
    [5, 6, 7, 8] * 4 + [5, 6],
    [11, 12, 13] * 5,
    list(range(20, 44)),
    [9, 9, 9, 9, 9, 9],
]
TREE = "budget={kind: fixed, draft_budget: 7}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Peaked enough that drafts are accepted and rejected alike."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def overrides(tiny: Path, *more: str) -> tuple[str, ...]:
    return (
        f"target.model={tiny}",
        "engine.context_length=256",
        "engine.args.skip_tokenizer_init=true",
        *more,
    )


def rounds(url: str) -> int:
    """How many rounds an answer takes; other requests take its slot afterwards."""
    body = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    ids = list(range(60, 30, -1))
    asked = {"input_ids": ids, "sampling_params": body}
    answer = httpx.post(f"{url}/generate", json=asked, timeout=120.0).json()
    for other in PROMPTS * 3:
        send(url, other, {"temperature": 0.0, "max_new_tokens": 1})
    count: int = answer["meta_info"]["spec_verify_ct"]
    return count


def send(url: str, ids: list[int], params: dict[str, Any]) -> list[int]:
    sampling = {"ignore_eos": True, **params}
    answer = httpx.post(
        f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=120.0
    )
    assert answer.status_code == 200, answer.text
    output: list[int] = answer.json()["output_ids"]
    return output


def greedy(url: str, num_tokens: int = 60) -> list[list[int]]:
    params = {"temperature": 0.0, "max_new_tokens": num_tokens}
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda ids: send(url, ids, params), PROMPTS))


def to_the_limit(url: str) -> list[list[int]]:
    """Four requests that end at the context limit, beside each other in the token table."""
    prompts = [(ids * 60)[: 240 - 3 * i] for i, ids in enumerate(PROMPTS)]
    with ThreadPoolExecutor(4) as pool:
        return list(
            pool.map(
                lambda ids: send(url, ids, {"temperature": 0.0, "max_new_tokens": 255 - len(ids)}),
                prompts,
            )
        )


def sampled(url: str, temperature: float, num: int = 1500) -> collections.Counter[tuple[int, ...]]:
    """Joint counts of the first three tokens after a repetitive prompt."""
    params = {"temperature": temperature, "max_new_tokens": 3}
    with ThreadPoolExecutor(8) as pool:
        outputs = pool.map(lambda _: send(url, PROMPTS[0], params), range(num))
        return collections.Counter(tuple(ids) for ids in outputs)


@pytest.fixture(scope="module")
def plain_tiny(serve: Serve, tiny: Path) -> dict[str, Any]:
    with serve("quickstart_ngram.yaml", *overrides(tiny, *PLAIN_OVERRIDES)) as url:
        return {
            "greedy": greedy(url),
            "limit": to_the_limit(url),
            "sampled": [sampled(url, 1.0), sampled(url, 1.0)],
            "cooler": sampled(url, 0.8),
        }


@pytest.fixture(scope="module")
def speculative_tiny(serve: Serve, tiny: Path) -> dict[str, Any]:
    wide = ("budget={kind: fixed, draft_budget: 15}", "drafter.shared_tokens=100000")
    with serve("quickstart_ngram.yaml", *overrides(tiny, *wide)) as url:
        found = {"greedy": greedy(url), "limit": to_the_limit(url), "sampled": sampled(url, 1.0)}
        found["metrics"] = httpx.get(f"{url}/metrics").text
        found["rounds"] = [rounds(url), rounds(url)]
        assert httpx.post(f"{url}/flush_cache").status_code == 200
        found["rounds"].append(rounds(url))
        return found


def test_greedy_outputs_are_equal(
    plain_tiny: dict[str, Any], speculative_tiny: dict[str, Any]
) -> None:
    assert speculative_tiny["greedy"] == plain_tiny["greedy"]


def test_emptied_caches_hold_no_drafts_either(speculative_tiny: dict[str, Any]) -> None:
    first, again, emptied = speculative_tiny["rounds"]
    assert again < first  # it drafts what it answered before
    assert emptied == first


def test_requests_at_the_context_limit_do_not_touch_each_other(
    plain_tiny: dict[str, Any], speculative_tiny: dict[str, Any]
) -> None:
    assert speculative_tiny["limit"] == plain_tiny["limit"]


def test_sampled_outputs_follow_the_same_law(
    plain_tiny: dict[str, Any], speculative_tiny: dict[str, Any]
) -> None:
    for plain in plain_tiny["sampled"]:
        assert same_law(speculative_tiny["sampled"], plain) > 1e-3


def test_another_law_would_be_noticed(plain_tiny: dict[str, Any]) -> None:
    """Control: the same test on another temperature rejects; on plain against plain it does not."""
    first, second = plain_tiny["sampled"]
    assert same_law(first, second) > 1e-3
    assert same_law(first, plain_tiny["cooler"]) < 1e-6


def test_sampling_accepted_and_rejected_drafts(speculative_tiny: dict[str, Any]) -> None:
    def total(name: str) -> float:
        lines = speculative_tiny["metrics"].splitlines()
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(f"specstack_{name}{{"))

    drafts = total("spec_decode_num_draft_tokens_total")
    accepted = total("spec_decode_num_accepted_tokens_total")
    assert 0.02 * drafts < accepted < 0.98 * drafts


def test_two_ranks_emit_what_one_emits(
    serve: Serve, tiny: Path, plain_tiny: dict[str, Any]
) -> None:
    with serve("quickstart_ngram.yaml", *overrides(tiny, TREE, "engine.tp=2")) as url:
        assert greedy(url) == plain_tiny["greedy"]
        seeded = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 24}
        assert send(url, PROMPTS[0], seeded) == send(url, PROMPTS[0], seeded)
        state = json.loads(httpx.get(f"{url}/server_info").text)["internal_states"][0]
        assert state["world_size"] == 2
