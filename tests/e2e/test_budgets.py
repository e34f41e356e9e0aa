"""Budgets of the real server: changed while it runs, measured when it starts, losing nothing."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from harness import Serve
from talk import ADMIN, QUESTIONS, Server

from specstack.metrics.record import RoundRecord
from specstack.metrics.trace import read_trace


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    trace = tmp_path_factory.mktemp("trace")
    overrides = (
        "budget={kind: fixed, draft_budget: 7, fallback: {rounds: 0}}",
        f"metrics.trace={trace}",
        "engine.args.admin_api_key=secret",
    )
    with serve("quickstart.yaml", *overrides) as url:
        yield Server(url, trace)


def rounds_of_last_request(server: Server, since: int) -> list[RoundRecord]:
    return [r for r in server.records()[since:] if r.num_requests == 1]


def by_context(records: list[RoundRecord]) -> dict[int, RoundRecord]:
    return {r.context_lens[0]: r for r in records if r.draft_budget == 7}


def same(one: RoundRecord, other: RoundRecord) -> bool:
    """What was offered, and what was right. Survivals are traced in thousandths."""
    width = max(one.survivals.shape[1], other.survivals.shape[1])
    rows = [np.pad(r.survivals[0], (0, width - r.survivals.shape[1])) for r in (one, other)]
    return one.num_correct == other.num_correct and np.abs(rows[0] - rows[1]).max() < 0.003


def test_drafting_resumes_as_if_it_had_never_been_off(server: Server) -> None:
    """The heads' caches are caught up: the same drafts, the same acceptance."""
    server.use({"kind": "fixed", "draft_budget": 7})
    since = len(server.records())
    always = server.ask(QUESTIONS[0])["output_ids"]
    reference = by_context(rounds_of_last_request(server, since))
    httpx.post(f"{server.url}/flush_cache", timeout=30.0, headers=ADMIN)
    since = len(server.records())

    def switch() -> None:
        time.sleep(0.3)
        server.use({"force": 0})
        first = server.status()["rounds"]
        while server.status()["rounds"] < first + 12:
            time.sleep(0.05)
        server.use({"force": None})

    thread = threading.Thread(target=switch)
    thread.start()
    switched = server.ask(QUESTIONS[0])["output_ids"]
    thread.join()
    assert switched == always
    rounds = rounds_of_last_request(server, since)
    off = [i for i, r in enumerate(rounds) if r.draft_budget == 0]
    assert len(off) >= 8, "it was off for a while"
    after = by_context(rounds[off[-1] + 1 :])
    common = sorted(after.keys() & reference.keys())
    assert len(common) >= 5, (sorted(after), sorted(reference))
    assert all(same(after[c], reference[c]) for c in common)
    shifted = pairwise(common)
    assert not all(same(after[a], reference[b]) for a, b in shifted), "control: other rounds"


def test_budgets_that_change_all_the_time_change_no_token(server: Server) -> None:
    server.use({"force": 0})
    plain = [server.ask(question, 48)["output_ids"] for question in QUESTIONS]
    server.use({"force": None})
    stop, random_budget = threading.Event(), random.Random(0)

    def change() -> None:
        while not stop.is_set():
            kinds: list[dict[str, Any]] = [
                {"kind": "fixed", "draft_budget": random_budget.choice([0, 1, 3, 7])},
                {"kind": "goodput", "choices": [0, 1, 3, 7]},
                {"kind": "ema", "choices": [1, 3, 7]},
                {"kind": "slo", "choices": [0, 3, 7], "tpot_ms": 80.0},
            ]
            server.use(random_budget.choice(kinds))
            time.sleep(0.15)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(2):
                answers = list(pool.map(lambda q: server.ask(q, 48)["output_ids"], QUESTIONS))
                assert answers == plain
    finally:
        stop.set()
        thread.join()
    budgets = {r.draft_budget for r in server.records()}
    assert len(budgets) >= 3, "control: they did change"


def test_counters_agree_with_what_requests_are_told(server: Server) -> None:
    server.use({"kind": "fixed", "draft_budget": 7})
    server.ask(QUESTIONS[1], 4)
    before = server.metrics()
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda q: server.ask(q, 40), QUESTIONS))
    after = server.metrics()

    def grew(name: str) -> float:
        return after[name] - before[name]

    meta = [reply["meta_info"] for reply in replies]
    drafts = "specstack_spec_decode_num_draft_tokens"
    correct = "specstack_spec_decode_num_accepted_tokens"
    assert grew(f"{correct}_total") == sum(m["spec_num_correct_drafts"] for m in meta)
    rounds = sum(m["spec_verify_ct"] for m in meta)
    assert grew("specstack_emitted_tokens_total") == rounds + grew(f"{correct}_total")
    assert 0 < grew(f"{correct}_total") <= grew(f"{drafts}_total")
    assert grew("specstack_wasted_drafts_total") == grew(f"{drafts}_total") - grew(
        f"{correct}_total"
    )
    assert 0 < grew("specstack_spec_decode_num_drafts_total") <= rounds
    for kind in ("pos", "context"):
        assert grew(f"{correct}_per_{kind}_total") == grew(f"{correct}_total")
        assert grew(f"{drafts}_per_{kind}_total") == grew(f"{drafts}_total")
    assert grew("specstack_prompt_tokens_total") == sum(m["prompt_tokens"] for m in meta)
    assert grew("specstack_decision_seconds_count") == grew("specstack_rounds_total")


def test_the_status_shows_a_shadow_and_what_is_decided(server: Server) -> None:
    status = server.use(
        {"kind": "fixed", "draft_budget": 3, "shadow": {"kind": "ema", "choices": [1, 3]}}
    )
    assert status["shadow"]["kind"] == "ema"
    server.ask(QUESTIONS[2], 24)
    status = server.status()
    assert status["budget"] == {"draft_budget": 3, "reason": "fixed", "min_survival": 0.0}
    assert status["shadow"]["next"]["reason"] == "ema"
    assert status["acceptance"]["accept_length"] > 1
    assert all(0 <= alpha <= 1 for alpha in status["acceptance"]["alpha"])
    info = httpx.get(f"{server.url}/server_info", timeout=60.0, headers=ADMIN).json()
    assert info["internal_states"][0]["specstack"]["live"]["policy"]["kind"] == "fixed"
    server.use({"shadow": None})


def test_changes_are_validated_and_need_the_admin_key(server: Server) -> None:
    assert server.post({"force": 0}, headers={}).status_code == 401
    wrong = server.post({"kind": "goodput", "choices": [3, 1]})
    assert wrong.status_code == 400
    assert "budget.choices" in wrong.json()["error"]
    assert "restart" in server.post({"kind": "fixed", "draft_budget": 8}).json()["error"]


def test_collapsed_acceptance_turns_drafting_off_and_says_so(server: Server) -> None:
    """Here by a bar that no drafter reaches."""
    server.use(
        {"kind": "fixed", "draft_budget": 3, "fallback": {"accept_length": 9.0, "rounds": 5}}
    )
    server.ask(QUESTIONS[3], 48)
    status = server.status()
    assert status["fallback"] == {"active": True, "count": 1}
    assert status["budget"]["reason"] in ("collapsed", "probe")
    metrics = server.metrics()
    assert metrics["specstack_fallback_active"] == 1
    assert metrics["specstack_fallbacks_total"] >= 1
    server.use({"kind": "fixed", "draft_budget": 3, "fallback": {"rounds": 0}})
    server.ask(QUESTIONS[3], 8)
    assert server.metrics()["specstack_fallback_active"] == 0


def test_a_trace_holds_numbers_alone(server: Server) -> None:
    header, records = read_trace(server.trace)
    assert sum(1 for _ in records) > 50
    text = "".join(path.read_text() for path in server.trace.glob("rounds-*.jsonl"))
    assert header["choices"]
    lines = [json.loads(line) for line in text.splitlines()[1:3]]
    assert all("secret" not in json.dumps(line) for line in [header, *lines])
    assert "animals" not in text
