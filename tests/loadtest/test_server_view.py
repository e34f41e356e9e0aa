"""What servers say of themselves over a phase, and what bound it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import RawRun, answer, failed, idle_client, one_result, open_loop

from specstack_loadtest.records import RequestRecord
from specstack_loadtest.server_identity import admission_cap, identity


def scrapes(**series: list[float]) -> tuple[tuple[float, dict[str, float]], ...]:
    """One a second from 10.5 s on: values by family, labels after two underscores."""
    names = {
        "running": "sglang:num_running_reqs", "queued": "sglang:num_queue_reqs",
        "kv": "sglang:token_usage", "retracted": "sglang:num_retracted_requests_total",
        "own_running": "specstack_running_requests", "own_queued": "specstack_queued_requests",
        "emitted": "specstack_emitted_tokens_total",
        "drafts": "specstack_spec_decode_num_drafts_total",
    }  # fmt: skip
    length = max(map(len, series.values()))
    return tuple(
        (10.5 + k, {names[name]: values[k] for name, values in series.items()})
        for k in range(length)
    )


def of_rounds(
    running: list[float], queued: list[float], emitted: list[float] | None = None
) -> tuple[tuple[float, dict[str, float]], ...]:
    """Specstack's own, beside gauges of SGLang that nothing has written since the server idled."""
    stale = [0.0] * len(running)
    emitted = emitted or [float(k) for k in range(len(running))]
    return scrapes(
        running=stale, queued=stale, own_running=running, own_queued=queued, emitted=emitted,
        drafts=stale,
    )  # fmt: skip


def in_step(num_users: int) -> tuple[RequestRecord, ...]:
    """Users who ask at once every 3 s and have to wait 2.8 s each time."""
    return tuple(
        answer(10.0 + 3 * turn, index=num_users * turn + user, gap_s=0.9)
        for turn in range(10)
        for user in range(num_users)
    )


CAP = {"internal": [{"effective_max_running_requests_per_dp": 4}]}


@pytest.mark.parametrize(
    ("run", "kind", "words"),
    [
        (
            RawRun((), of_rounds([4.0] * 20, [3.0] * 15 + [0.0] * 5), server=CAP),
            "admission",
            "all 4 places were taken while requests waited for one, in 75 % of 20 scrapes",
        ),
        (
            RawRun((), scrapes(running=[2.0] * 20, queued=[3.0] * 20, kv=[0.97] * 20), server=CAP),
            "kv",
            "it was more than 95 % full in 100 % of scrapes",
        ),
        (
            RawRun((), scrapes(running=[2.0] * 20, queued=[0.0] * 20, kv=[0.3] * 20), server=CAP),
            "compute",
            "no request waited for a place in any scrape; the KV cache was at most 30 % full; what"
            " is left is the time that rounds take",
        ),
        (RawRun(()), "unknown", "the server exports neither running nor waiting requests"),
    ],
    ids=["admission", "kv", "compute", "unknown"],
)
def test_what_bound_a_phase(tmp_path: Path, run: RawRun, kind: str, words: str) -> None:
    records = tuple(answer(10.0 + k, index=k) for k in range(20))
    result = one_result(tmp_path, replace(run, records=records, samples=idle_client(40)))
    assert result["bound"]["kind"] == kind
    assert result["bound"]["evidence"] == words


@pytest.mark.parametrize("found", [(), scrapes(running=[0.0] * 20, queued=[0.0] * 20)])
def test_more_requests_than_places_wait_whatever_a_stale_gauge_says(
    tmp_path: Path, found: tuple[tuple[float, dict[str, float]], ...]
) -> None:
    run = RawRun(in_step(5), found, idle_client(40), server=CAP)
    bound = one_result(tmp_path, run)["bound"]
    assert bound["kind"] == "admission"
    assert bound["evidence"] == (
        "more requests were in flight than there are places, 4, for 93 % of the time (by the"
        " client's count: the server's own is not of each round)"
    )


def test_as_many_requests_as_places_do_not_wait(tmp_path: Path) -> None:
    """Control."""
    stale = scrapes(running=[0.0] * 20, queued=[0.0] * 20)
    run = RawRun(in_step(4), stale, idle_client(40), server=CAP)
    assert one_result(tmp_path, run)["bound"]["kind"] == "compute"


def test_a_server_that_tells_of_each_round_is_believed(tmp_path: Path) -> None:
    """It runs two at a time with four places, and one waits: places are not what is short."""
    run = RawRun(in_step(5), of_rounds([2.0] * 20, [1.0] * 20), idle_client(40), server=CAP)
    result = one_result(tmp_path, run)
    assert result["bound"]["kind"] == "compute"
    assert result["server"]["running"] == {"mean": 2, "max": 2, "scrapes": 20}


def test_what_the_last_round_left_is_not_the_state_of_an_idle_server(tmp_path: Path) -> None:
    emitted = [*(float(k) for k in range(5)), *[4.0] * 15]
    run = RawRun((answer(10.0),), of_rounds([3.0] * 4 + [1.0] * 16, [0.0] * 20, emitted))
    assert one_result(tmp_path, run)["server"]["running"] == {"mean": 2.6, "max": 3, "scrapes": 5}


@pytest.mark.parametrize(
    ("retracted", "kind", "words"),
    [
        (1.0, "compute", "a request lost its place in the KV cache once (30 were due)"),
        (2.0, "kv", "requests lost their place in the KV cache 2 times (30 were due)"),
    ],
)
def test_a_few_lost_places_do_not_make_the_kv_cache_the_limit(
    tmp_path: Path, retracted: float, kind: str, words: str
) -> None:
    found = scrapes(
        running=[2.0] * 20, queued=[0.0] * 20, kv=[0.8] * 20, retracted=[0.0] * 19 + [retracted]
    )
    records = tuple(answer(10.0 + k, index=k) for k in range(30))
    bound = one_result(tmp_path, RawRun(records, found, idle_client(40)))["bound"]
    assert bound["kind"] == kind
    assert bound["evidence"].endswith(words)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (tuple(failed(10.0 + k, index=k) for k in range(20)), "no request was answered"),
        ((answer(1.0, warmup=True),), "nothing was due"),
    ],
)
def test_without_answers_nothing_is_known_of_the_server(
    tmp_path: Path, records: tuple[RequestRecord, ...], words: str
) -> None:
    run = RawRun(records, scrapes(running=[0.0] * 20, queued=[0.0] * 20), idle_client(40))
    for number, scenario in enumerate((None, open_loop())):
        bound = one_result(tmp_path / str(number), run, scenario=scenario)["bound"]
        assert (bound["kind"], bound["evidence"]) == ("unknown", words)


def arrivals(num: int) -> str:
    """A scenario of so many, ten a second."""
    scenario = open_loop(rate=10.0).replace("warmup: {seconds: 10}\n", "")
    return scenario.replace("stop: {seconds: 40}", f"stop: {{requests: {num}}}")


@pytest.mark.parametrize(("answer_s", "kind"), [(1.0, "compute"), (0.1, "load")])
def test_what_an_overloaded_server_answers_after_the_last_arrival_does_not_count(
    tmp_path: Path, answer_s: float, kind: str
) -> None:
    """Ten requests a second, a hundred in all; answered one after the other."""
    scenario = arrivals(100)
    records = tuple(
        answer(0.1 * k, index=k, ttft_s=answer_s * (k + 1) - 0.1 * k, chunks=1) for k in range(100)
    )
    found = ((t, values) for t, (_, values) in enumerate(scrapes(running=[1.0], queued=[0.0]), 5))
    run = RawRun(records, tuple(found), idle_client(100))
    result = one_result(tmp_path, run, scenario=scenario)
    assert result["bound"]["kind"] == kind
    assert result["due_per_s"] == pytest.approx(10)
    assert result["asked_tokens_per_s"] == pytest.approx(320)


def test_later_turns_do_not_make_the_load_longer(tmp_path: Path) -> None:
    """They are due when the answer before them has come, however late that is."""
    scenario = arrivals(50)
    records = tuple(
        answer(0.1 * k if turn == 0 else k + 1.0, index=k, turn=turn, end_s=k + 1.0 + 50 * turn)
        for k in range(50)
        for turn in range(2)
    )
    found = scrapes(running=[1.0] * 20, queued=[0.0] * 20)
    result = one_result(tmp_path, RawRun(records, found, idle_client(100)), scenario=scenario)
    assert result["bound"]["kind"] == "compute"


def test_a_server_that_keeps_up_is_bound_by_the_load(tmp_path: Path) -> None:
    records = tuple(answer(10.0 + k, index=k) for k in range(30))
    run = RawRun(records, scrapes(running=[1.0] * 20, queued=[0.0] * 20), idle_client(40))
    result = one_result(tmp_path, run, scenario=open_loop())
    assert result["bound"]["kind"] == "load"


def counters(
    at_s: float, rounds: float, prefix: str = "specstack_"
) -> tuple[float, dict[str, float]]:
    """A server that drafts two tokens a round, of which the first is right in 3 of 4, the second in
    1 of 2; a tenth of its rounds is plain.
    """
    return at_s, {
        f'{prefix}rounds_total{{draft_budget="2",reason="goodput"}}': 9 * rounds,
        f'{prefix}rounds_total{{draft_budget="0",reason="off"}}': rounds,
        f'{prefix}shadow_rounds_total{{draft_budget="2",reason="goodput"}}': 1e6 * rounds,
        f"{prefix}emitted_tokens_total": 25 * rounds,
        f"{prefix}spec_decode_num_drafts_total": 12 * rounds,
        f"{prefix}spec_decode_num_draft_tokens_total": 24 * rounds,
        f"{prefix}spec_decode_num_accepted_tokens_total": 15 * rounds,
        f'{prefix}spec_decode_num_draft_tokens_per_pos_total{{position="0"}}': 12 * rounds,
        f'{prefix}spec_decode_num_draft_tokens_per_pos_total{{position="1"}}': 12 * rounds,
        f'{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="0"}}': 9 * rounds,
        f'{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="1"}}': 6 * rounds,
        f'{prefix}prompt_tokens_total{{source="cache"}}': 30 * rounds,
        f'{prefix}prompt_tokens_total{{source="computed"}}': 70 * rounds,
    }


@pytest.mark.parametrize("prefix", ["specstack_", "my_own_"])
def test_acceptance_budgets_and_cache_follow_from_counters(tmp_path: Path, prefix: str) -> None:
    """Counters before the measured part do not count."""
    found = tuple(counters(t, t, prefix) for t in (1.0, 11.0, 21.0, 31.0, 45.0))
    records = tuple(answer(10.0 + k, index=k, cached_tokens=None) for k in range(20))
    result = one_result(tmp_path, RawRun(records, found))
    counted = result["acceptance"]["counters"]
    assert result["acceptance"]["bonus_included"]
    assert counted["accept_length"] == 1 + 15 / 12
    assert counted["accept_rate"] == 15 / 24
    assert counted["drafting_rounds"] == 12 * 20
    assert counted["positions"] == [
        {"depth": 1, "verified": 1, "right": 0.75, "alpha": 0.75},
        {"depth": 2, "verified": 1, "right": 0.5, "alpha": pytest.approx(2 / 3, rel=1e-5)},
    ]
    assert result["budget"]["mean"] == pytest.approx(1.8)
    assert result["budget"]["plain_share"] == pytest.approx(0.1)
    assert [c["rounds"] for c in result["budget"]["by_choice"]] == [180, 20]
    assert result["prefix_cache"] == {
        "cached_tokens": 600, "prompt_tokens": 2000, "share": 0.3, "source": "counters",
    }  # fmt: skip


def test_a_counter_that_began_again_counts_from_zero(tmp_path: Path) -> None:
    records = tuple(answer(10.0 + k, index=k) for k in range(20))
    result = one_result(tmp_path, RawRun(records, (counters(11.0, 50.0), counters(39.0, 7.0))))
    assert result["acceptance"]["counters"]["drafting_rounds"] == 12 * 7


def test_accept_lengths_of_requests_count_the_bonus(tmp_path: Path) -> None:
    records = tuple(
        answer(10.0 + k, index=k, num_rounds=10, num_correct_drafts=k,
               correct_drafts_histogram=(10 - k, k))
        for k in range(10)
    )  # fmt: skip
    found = one_result(tmp_path, RawRun(records))["acceptance"]
    assert found["counters"] is None
    assert found["per_request"]["accept_length"] == pytest.approx(1.45)
    assert found["per_request"]["distribution"]["max"] == pytest.approx(1.9)
    assert found["per_request"]["rounds_by_right_drafts"] == [55, 45]


def test_cached_prompt_tokens_come_from_the_answers_where_they_say(tmp_path: Path) -> None:
    records = tuple(answer(10.0 + k, index=k) for k in range(10))
    found = one_result(tmp_path, RawRun(records))["prefix_cache"]
    assert (found["share"], found["source"]) == (0.25, "answers")


def test_a_count_of_prompt_tokens_without_a_source_says_nothing_of_the_cache(
    tmp_path: Path,
) -> None:
    """vLLM's, where it speculates."""
    found = tuple(
        (t, {"vllm:spec_decode_num_drafts_total": t, "vllm:prompt_tokens_total": 20 * t})
        for t in (11.0, 21.0)
    )
    records = tuple(answer(10.0 + k, index=k, cached_tokens=None) for k in range(10))
    assert one_result(tmp_path, RawRun(records, found))["prefix_cache"] is None


def test_a_server_says_how_many_it_runs_and_what_it_is() -> None:
    state = {"effective_max_running_requests_per_dp": 8, "specstack": {"plan_hash": "ab"}}
    server = {"version": "0.5.23", "dp_size": 2, "max_running_requests": 99, "state": [state]}
    assert admission_cap(server) == 16
    assert admission_cap({"max_running_requests": 99}) == 99
    assert admission_cap({"models": []}) is None
    assert identity(server) == {"version": "0.5.23", "plan_hash": "ab"}
