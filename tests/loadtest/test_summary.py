"""Numbers of folders whose raw files were made so that the answers are known."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from run_folders import (
    RawRun,
    Speed,
    answer,
    closed,
    failed,
    idle_client,
    one_result,
    open_loop,
    simulated,
    write_folder,
)

from specstack_loadtest.folder import FolderError
from specstack_loadtest.summary import as_csv, as_text, summarise, write_summary


def test_percentiles_of_a_phase(tmp_path: Path) -> None:
    """A hundred requests with TTFT 1 ms .. 100 ms."""
    records = tuple(
        answer(10 + 0.25 * k, index=k, ttft_s=0.001 * (k + 1), gap_s=0.02) for k in range(100)
    )
    result = one_result(tmp_path, RawRun(records))
    found = result["ttft_ms"]
    assert [found[p]["value"] for p in ("p50", "p90", "p95", "p99")] == [50, 90, 95, 99]
    assert (found["count"], found["max"], found["mean"]["value"]) == (100, 100, 50.5)
    assert found["p50"]["low"] < 50 < found["p50"]["high"]
    assert found["p99"]["low"] is None
    assert result["itl_ms"]["count"] == 300
    assert result["itl_ms"]["p99"]["value"] == pytest.approx(20)
    assert result["tpot_ms"]["p50"]["value"] == pytest.approx(20)
    assert result["e2e_ms"]["max"] == pytest.approx(160)


def test_few_requests_have_no_high_percentiles(tmp_path: Path) -> None:
    records = tuple(answer(11.0 + k, index=k) for k in range(19))
    found = one_result(tmp_path, RawRun(records))["ttft_ms"]
    assert found["p50"]["value"] is not None
    assert found["p90"]["value"] is not None
    assert found["p95"]["value"] is None
    assert found["p99"] == {"value": None, "low": None, "high": None}
    assert found["count"] == 19


def test_only_the_measured_part_counts(tmp_path: Path) -> None:
    """From 10 s to 40 s: requests by when they were due, tokens by when they arrived."""
    records = (
        answer(9.0, index=0, warmup=True, ttft_s=0.5, gap_s=1.0),  # chunks at 9.5, 10.5, 11.5, 12.5
        answer(10.0, index=1, ttft_s=1.0, gap_s=1.0),  # 11, 12, 13, 14
        answer(39.0, index=2, ttft_s=0.5, gap_s=1.0),  # 39.5, 40.5, 41.5, 42.5
        answer(40.5, index=3),
    )
    result = one_result(tmp_path, RawRun(records))
    assert result["requests"]["measured"] == 2
    assert result["tokens_per_s"]["value"] == pytest.approx((3 + 4 + 1) / 30, rel=1e-5)
    assert result["answers_per_s"]["value"] == pytest.approx(2 / 30, rel=1e-5)
    assert result["ttft_ms"]["count"] == 2
    assert result["measured_s"] == 30


def test_throughput_pools_the_repeats(tmp_path: Path) -> None:
    runs = [
        RawRun(tuple(answer(10.2 + 0.5 * k, index=k, per_chunk=n) for k in range(59)))
        for n in (1, 3)
    ]
    result = one_result(tmp_path, *runs)
    assert [part["tokens_per_s"] for part in result["parts"]] == pytest.approx(
        [59 * 4 / 30, 59 * 12 / 30], rel=1e-5
    )
    assert result["tokens_per_s"]["value"] == pytest.approx(59 * 16 / 60, rel=1e-5)
    assert result["tokens_per_s"]["low"] < result["tokens_per_s"]["value"]


def test_phases_after_one_another_count_apart(tmp_path: Path) -> None:
    records = (
        *(answer(10.0 + k, index=k, ttft_s=0.1) for k in range(20)),
        *(answer(50.0 + k, phase=1, index=k, ttft_s=0.2) for k in range(10)),
    )
    runs = {("server", 0): RawRun(records)}
    folder = write_folder(tmp_path / "f", closed(users=(1, 2)), runs, baseline=None)
    found = summarise(folder)["results"]
    assert [r["requests"]["measured"] for r in found] == [20, 10]
    assert [r["ttft_ms"]["p50"]["value"] for r in found] == [100, 200]


def test_a_phase_of_requests_is_measured_from_the_first_that_counts(tmp_path: Path) -> None:
    records = tuple(answer(float(k), index=k, warmup=k < 2) for k in range(8))
    scenario = closed().replace("stop: {seconds: 40}", "stop: {requests: 8}")
    scenario = scenario.replace("warmup: {seconds: 10}", "warmup: {requests: 2}")
    result = one_result(tmp_path, RawRun(records), scenario=scenario)
    assert result["requests"]["measured"] == 6
    assert result["parts"][0]["start_s"] == 2
    assert result["parts"][0]["end_s"] == pytest.approx(7.25)
    assert result["tokens_per_s"]["value"] == pytest.approx(24 / 5.25, rel=1e-5)
    assert result["answers_per_s"]["value"] == pytest.approx(6 / 5.25, rel=1e-5)


def test_what_came_before_a_phase_of_requests_counts_does_not(tmp_path: Path) -> None:
    """Control: each request is due when the one before it ends, the last one of warm-up, too."""
    records = tuple(answer(0.25 * k, index=k, warmup=k < 2) for k in range(8))
    scenario = closed(users=(1,)).replace("stop: {seconds: 40}", "stop: {requests: 8}")
    scenario = scenario.replace("warmup: {seconds: 10}", "warmup: {requests: 2}")
    result = one_result(tmp_path, RawRun(records), scenario=scenario)
    assert result["measured_s"] == 1.5
    assert result["tokens_per_s"]["value"] == 24 / 1.5
    assert result["answers_per_s"]["value"] == 6 / 1.5


def test_what_comes_after_a_phase_of_seconds_does_not_count(tmp_path: Path) -> None:
    """Control: the last answer ends beyond it."""
    records = (answer(20.0, index=0), answer(39.9, index=1, ttft_s=0.05, gap_s=0.04))
    result = one_result(tmp_path, RawRun(records))
    assert result["tokens_per_s"]["value"] == pytest.approx((4 + 2) / 30, rel=1e-5)
    assert result["answers_per_s"]["value"] == pytest.approx(1 / 30, rel=1e-5)


def test_errors_are_counted_and_have_no_latency(tmp_path: Path) -> None:
    records = (
        *(answer(11.0 + k, index=k) for k in range(6)),
        failed(20.0, index=6),
        failed(21.0, index=7),
        failed(22.0, "timeout", index=8),
    )
    folder = write_folder(tmp_path / "f", closed(), {("server", 0): RawRun(records)}, baseline=None)
    summary = summarise(folder)
    result = summary["results"][0]
    assert result["requests"]["errors"] == {"http_503": 2, "timeout": 1}
    assert result["e2e_ms"]["count"] == 6
    assert result["good"]["share"]["value"] == pytest.approx(6 / 9, rel=1e-5)
    assert result["good"]["per_s"] == pytest.approx(6 / 30, rel=1e-5)
    (problem,) = [p for p in summary["problems"] if p["kind"] == "errors"]
    assert problem["fatal"]
    assert problem["text"].startswith(
        "server, 2 users: 3 of 9 requests failed (http_503: 2, timeout: 1)."
    )


def test_requests_in_flight(tmp_path: Path) -> None:
    """Two overlap for 2 s of the 30; one began before the measured part."""
    records = (
        answer(8.0, index=0, warmup=True, ttft_s=1.0, gap_s=1.0, chunks=4),  # to 12
        answer(10.0, index=1, ttft_s=1.0, gap_s=1.0, chunks=6),  # 10 to 16
    )
    found = one_result(tmp_path, RawRun(records))["in_flight"]
    assert found["mean"] == pytest.approx((2 + 6) / 30, rel=1e-5)
    assert found["max"] == 2


def test_lateness_counts_and_is_the_clients_fault(tmp_path: Path) -> None:
    records = tuple(answer(10.0 + k, index=k, late_s=0.2, ttft_s=0.3) for k in range(20))
    run = RawRun(records, samples=idle_client(40))
    folder = write_folder(tmp_path / "f", open_loop(), {("server", 0): run}, baseline=None)
    summary = summarise(folder)
    (result,) = summary["results"]
    assert result["ttft_ms"]["p50"]["value"] == pytest.approx(300)
    assert result["client"]["saturated"]
    assert result["bound"]["kind"] == "client"
    assert any(p["kind"] == "client" and p["fatal"] for p in summary["problems"])


def test_a_missing_baseline_is_said(tmp_path: Path) -> None:
    run = RawRun((answer(10.0),))
    summary = summarise(write_folder(tmp_path / "f", closed(), {("a", 0): run}, baseline=None))
    assert summary["outputs"] is None
    assert summary["comparisons"] == []
    assert [(p["kind"], p["fatal"]) for p in summary["problems"]] == [("baseline", False)]


@pytest.mark.parametrize("flushed", [True, False])
def test_prompts_that_another_side_left_in_the_cache_are_said(
    tmp_path: Path, flushed: bool
) -> None:
    run = RawRun((answer(10.0),), cache_flushed=flushed)
    folder = write_folder(tmp_path / "f", closed(), {("plain", 0): run, ("a", 0): run})
    found = [p["fatal"] for p in summarise(folder)["problems"] if p["kind"] == "cache"]
    assert found == ([] if flushed else [False])


@pytest.mark.parametrize(("flushed", "said"), [((True, True), 0), ((True, False), 1)])
def test_prompts_that_a_repeat_left_in_the_cache_are_said(
    tmp_path: Path, flushed: tuple[bool, bool], said: int
) -> None:
    runs = {
        ("a", repeat): RawRun((answer(10.0),), cache_flushed=one)
        for repeat, one in enumerate(flushed)
    }
    folder = write_folder(tmp_path / "f", closed(), runs, baseline=None)
    found = [p for p in summarise(folder)["problems"] if p["kind"] == "cache"]
    assert [p["fatal"] for p in found] == [False] * said
    assert all(p["text"].startswith("a: 2 runs on one server") for p in found)


@pytest.mark.parametrize(("key", "fatal"), [("version", True), ("plan_hash", True), ("url", False)])
def test_repeats_on_different_servers_are_not_one_side(
    tmp_path: Path, key: str, fatal: bool
) -> None:
    server = {"version": "1", "model_path": "m", "dtype": "float32"}
    runs = {
        ("a", repeat): RawRun((answer(10.0),), server={**server, **told})
        for repeat, told in enumerate(({}, {key: "2"}, {}))
    }
    runs["b", 0] = RawRun((answer(10.0),), server={**server, "version": "3"})
    runs["a", 3] = RawRun((answer(10.0),))  # says nothing of itself
    summary = summarise(write_folder(tmp_path / "f", closed(), runs, baseline=None))
    found = [p for p in summary["problems"] if p["kind"] == "server"]
    assert [p["fatal"] for p in found] == [True] * fatal
    assert all(p["text"].startswith(f"a: its runs were of different servers ({key}") for p in found)


def test_requests_of_the_warmup_that_failed_are_said(tmp_path: Path) -> None:
    records = (
        failed(1.0, index=0, warmup=True), failed(2.0, index=1, warmup=True),
        answer(11.0, index=2), failed(12.0, index=3),
    )  # fmt: skip
    for name, given in (("one", records), ("other", records[2:])):
        runs = {("a", 0): RawRun(given)}
        summary = summarise(write_folder(tmp_path / name, closed(), runs, baseline=None))
        texts = [p["text"] for p in summary["problems"] if p["kind"] == "errors" and p["fatal"]]
        assert texts[0].startswith("a, 2 users: 1 of 2 requests failed")
        assert texts[1:] == ["a, repeat 1: 2 requests outside the measured part failed."] * (
            name == "one"
        )


def test_what_the_client_broke_off_did_not_fail(tmp_path: Path) -> None:
    """Of a run that was interrupted at 25 s: what had arrived of it counts, as of any answer."""
    records = (
        *(answer(11.0 + k, index=k) for k in range(14)),
        *(failed(24.6, "cancelled", index=k, chunks=2, end_s=25.0) for k in (14, 15)),
    )
    run = RawRun(records, complete=False, reason="interrupted")
    folder = write_folder(tmp_path / "f", closed(), {("a", 0): run}, baseline=None)
    summary = summarise(folder)
    (result,) = summary["results"]
    requests = result["requests"]
    assert (requests["measured"], requests["failed"], requests["errors"]) == (14, 0, {})
    assert result["good"]["share"]["value"] == 1
    assert result["measured_s"] == 15
    assert result["tokens_per_s"]["value"] == pytest.approx((14 * 4 + 2 * 2) / 15, rel=1e-5)
    assert [p["kind"] for p in summary["problems"] if p["fatal"]] == ["run"]


def test_a_run_that_was_killed_counts_what_its_workers_left(tmp_path: Path) -> None:
    records = [answer(10.0 + 0.25 * k, index=k) for k in range(60)]
    folder = write_folder(
        tmp_path / "f", closed(), {("a", 0): RawRun(tuple(records), samples=idle_client(25))},
        baseline=None,
    )  # fmt: skip
    whole = summarise(folder)["results"][0]
    raw = folder / "raw/a/0"
    (raw / "run.json").unlink()
    (raw / "requests.jsonl").unlink()
    (raw / "client.jsonl").rename(raw / "client-0.jsonl")
    for worker in range(2):
        text = "".join(record.as_line() + "\n" for record in records[worker::2])
        (raw / f"requests-{worker}.jsonl").write_text(text + '{"phase": 0, "ind')
    summary = summarise(folder)
    (result,) = summary["results"]
    assert result["requests"] == whole["requests"]
    assert result["ttft_ms"] == whole["ttft_ms"]
    assert result["client"]["sentence"] == "The client kept up."
    assert "a, repeat 1: the run ended early (it was killed), after 25 s." in [
        p["text"][:61] for p in summary["problems"] if p["fatal"]
    ]


def test_a_run_that_ended_early_counts_until_then(tmp_path: Path) -> None:
    """Dead at 25 s: half of the measured part."""
    records = tuple(answer(10.0 + 0.25 * k, index=k) for k in range(60))
    run = RawRun(records, complete=False, reason="the server is gone")
    folder = write_folder(tmp_path / "f", closed(users=(1, 2)), {("a", 0): run}, baseline=None)
    summary = summarise(folder)
    (result,) = summary["results"]  # the second phase was not begun
    assert result["parts"][0]["cut"]
    assert result["measured_s"] == pytest.approx(15, abs=0.1)
    assert result["tokens_per_s"]["value"] == pytest.approx(60 * 4 / 15, rel=1e-5)
    assert summary["problems"][0]["text"] == (
        "a, repeat 1: the run ended early (the server is gone), after 25 s. What was measured until"
        " then counts; phases after it do not."
    )


def test_a_run_that_is_not_there_is_said(tmp_path: Path) -> None:
    run = RawRun((answer(10.0),))
    folder = write_folder(tmp_path / "f", closed(), {("plain", 0): run, ("a", 0): run}, repeats=2)
    texts = [p["text"] for p in summarise(folder)["problems"] if p["kind"] == "run"]
    assert texts == [
        f"{side}, repeat 2: there is no such run; it counts nowhere." for side in ("plain", "a")
    ]


def test_estimated_tokens_are_said(tmp_path: Path) -> None:
    run = RawRun((answer(10.0, chunk_tokens=()),))
    summary = summarise(write_folder(tmp_path / "f", closed(), {("a", 0): run}, baseline=None))
    assert summary["results"][0]["tokens_per_chunk"] == "estimated"
    assert [p["kind"] for p in summary["problems"]] == ["baseline", "tokens"]


def test_timelines_hold_every_token_and_request_second(tmp_path: Path) -> None:
    run = simulated(Speed(), users=[1, 3], seconds=20, warmup=5, seed=1)
    scenario = closed(users=(1, 3), seconds=20, warmup=5)
    folder = write_folder(tmp_path / "f", scenario, {("a", 0): run}, baseline=None)
    (line,) = summarise(folder)["timelines"]
    tokens = sum(r.output_tokens or 0 for r in run.records)
    assert sum(line["tokens_per_s"]) * line["bin_s"] == pytest.approx(tokens, rel=1e-4)
    held = sum(r.end_s - r.sent_s for r in run.records)
    assert sum(line["in_flight"]) * line["bin_s"] == pytest.approx(held, rel=1e-4)


def test_a_summary_repeats_itself_and_is_strict_json(tmp_path: Path) -> None:
    runs = {
        (side, repeat): simulated(Speed(budget=budget), [1, 4], 30, 5, seed=repeat)
        for side, budget in (("plain", 0), ("three", 3))
        for repeat in range(2)
    }
    folder = write_folder(tmp_path / "f", closed(users=(1, 4), seconds=30, warmup=5), runs)
    first = as_text(summarise(folder))
    assert as_text(summarise(folder)) == first
    assert json.loads(first, parse_constant=pytest.fail)["version"] == 1
    write_summary(folder)
    assert (folder / "summary.json").read_text() == first
    rows = list(csv.DictReader(io.StringIO((folder / "summary.csv").read_text())))
    assert [(row["side"], row["phase"]) for row in rows] == [
        ("plain", "1 user"), ("plain", "4 users"), ("three", "1 user"), ("three", "4 users"),
    ]  # fmt: skip
    assert rows[3]["verdict"] == "faster"
    assert rows[0]["tokens_per_s_ratio"] == ""


def test_a_folder_without_results_has_an_empty_table(tmp_path: Path) -> None:
    run = RawRun((answer(1.0, warmup=True),))
    summary = summarise(write_folder(tmp_path / "f", closed(), {("a", 0): run}, baseline=None))
    assert summary["results"][0]["requests"]["measured"] == 0
    assert as_csv({**summary, "results": []}) == ""


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="not a folder of load tests"):
        summarise(tmp_path)


def test_a_raw_file_that_is_broken_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", closed(), {("a", 0): RawRun((answer(10.0),))})
    (folder / "raw/a/0/metrics.jsonl").write_text('{"t_s": 1, "values": {}}\n{oops\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        summarise(folder)
