"""A side against the baseline: the same requests, verdicts, outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folders import RawRun, Speed, answer, closed, open_loop, simulated, write_folder

from specstack_loadtest.arrivals import Phase
from specstack_loadtest.cell import Cell
from specstack_loadtest.paired import compare
from specstack_loadtest.runs import Run
from specstack_loadtest.summary import summarise


def two_sides(
    folder: Path, scenario: str, plain: list[Any], fast: list[Any], **changes: Any
) -> dict[str, Any]:
    """The summary of one repeat of two sides."""
    runs = {("plain", 0): RawRun(tuple(plain)), ("fast", 0): RawRun(tuple(fast))}
    return summarise(write_folder(folder / "f", scenario, runs, **changes))


def test_differences_are_of_the_same_requests(tmp_path: Path) -> None:
    """The fast side answers 40 ms sooner; requests that one side alone has do not count."""
    plain = [answer(10.0 + k, index=k, ttft_s=0.1 + 0.01 * (k % 5)) for k in range(20)]
    fast = [answer(10.0 + k, index=k, ttft_s=0.06 + 0.01 * (k % 5)) for k in range(20)]
    fast += [answer(30.0 + k, index=20 + k, ttft_s=9.0) for k in range(5)]
    summary = two_sides(tmp_path, open_loop(), plain, fast)
    (found,) = summary["comparisons"]
    paired = found["paired"]["ttft_ms"]
    assert paired["pairs"] == 20
    assert paired["difference"]["value"] == pytest.approx(-40)
    assert paired["difference"]["high"] < 0
    assert paired["baseline_mean"] == pytest.approx(120)
    assert (found["verdict"], found["by"]) == ("faster", "e2e_ms")
    assert found["speedup"]["value"] == pytest.approx(270 / 230, rel=1e-5)  # of 120 ms and 150 ms
    assert 1 < found["speedup"]["low"] <= found["speedup"]["value"]


def test_a_request_of_several_repeats_counts_once(tmp_path: Path) -> None:
    runs = {
        (side, repeat): RawRun(
            tuple(answer(10.0 + k, index=k, ttft_s=base + 0.1 * repeat) for k in range(10))
        )
        for side, base in (("plain", 0.2), ("fast", 0.1))
        for repeat in range(2)
    }
    summary = summarise(write_folder(tmp_path / "f", open_loop(), runs))
    paired = summary["comparisons"][0]["paired"]["ttft_ms"]
    assert paired["pairs"] == 10
    assert paired["difference"]["value"] == pytest.approx(-100)


@pytest.mark.parametrize(("gap_s", "verdict"), [(0.01, "faster"), (0.05, "same"), (0.09, "slower")])
def test_a_closed_loop_is_judged_by_throughput(tmp_path: Path, gap_s: float, verdict: str) -> None:
    def loop(gap_s: float) -> list[Any]:
        length_s = 0.1 + 3 * gap_s
        return [
            answer(10.0 + length_s * k, index=k, gap_s=gap_s) for k in range(int(30 / length_s))
        ]

    summary = two_sides(tmp_path, closed(users=(1,)), loop(0.05), loop(gap_s))
    (found,) = summary["comparisons"]
    assert (found["verdict"], found["by"]) == (verdict, "tokens_per_s")
    ratio = found["tokens_per_s_ratio"]
    assert ratio["value"] == pytest.approx(0.25 / (0.1 + 3 * gap_s), rel=0.03)
    assert ratio["low"] <= ratio["value"] <= ratio["high"]
    assert found["speedup"] == ratio


def test_what_is_too_short_is_not_judged(tmp_path: Path) -> None:
    records = [answer(10.0 + k, index=k) for k in range(3)]
    scenario = closed(seconds=14)
    (found,) = two_sides(tmp_path, scenario, records, records)["comparisons"]
    assert found["verdict"] == "unknown"
    assert found["tokens_per_s_ratio"]["low"] is None


def test_tails_are_compared_at_the_highest_percentile_of_both(tmp_path: Path) -> None:
    plain = [answer(10.0 + 0.05 * k, index=k, ttft_s=0.2) for k in range(120)]
    fast = [answer(10.0 + 0.25 * k, index=k, ttft_s=0.1) for k in range(30)]
    (found,) = two_sides(tmp_path, open_loop(rate=5), plain, fast)["comparisons"]
    assert found["tail"]["percent"] == 95
    assert found["tail"]["ttft_ms"]["side"] == pytest.approx(100)
    assert found["tail"]["ttft_ms"]["difference"]["value"] == pytest.approx(-100)


def test_different_greedy_outputs_are_a_failure(tmp_path: Path) -> None:
    """Where plain decoding's repeats agree."""
    plain = [answer(10.0 + k, index=k) for k in range(10)]
    fast = [replace(r, text_sha256="else") if r.index in (3, 7) else r for r in plain]
    fast[1] = replace(fast[1], text_sha256="sampled", temperature=0.7)
    runs = {
        (side, repeat): RawRun(tuple(records))
        for side, records in (("plain", plain), ("fast", fast))
        for repeat in range(2)
    }
    summary = summarise(write_folder(tmp_path / "f", open_loop(), runs))
    found = summary["outputs"]["sides"]["fast"]
    assert (found["pairs"], found["different"], found["beyond_control"]) == (18, 4, True)
    assert found["examples"] == [[0, 3, 0], [0, 7, 0]]
    (problem,) = [p for p in summary["problems"] if p["kind"] == "outputs"]
    assert problem["fatal"]
    assert problem["text"] == (
        "fast: 4 of 18 greedy answers differ from plain's. plain's own repeats differ in 0 of 10."
    )


@pytest.mark.parametrize("num_plain", [1, 2])
def test_without_a_control_different_outputs_are_no_failure(tmp_path: Path, num_plain: int) -> None:
    """There is one repeat, or the second one has no answer in common with it."""
    plain = tuple(answer(10.0 + k, index=k) for k in range(10))
    fast = tuple(replace(r, text_sha256="else") for r in plain)
    later = tuple(answer(10.0 + k, index=20 + k) for k in range(10))
    runs = {("plain", 0): RawRun(plain), ("fast", 0): RawRun(fast)}
    if num_plain == 2:
        runs |= {("plain", 1): RawRun(later), ("fast", 1): RawRun(later)}
    summary = summarise(write_folder(tmp_path / "f", open_loop(), runs))
    assert summary["outputs"]["sides"]["fast"]["different"] == 10
    assert [p["fatal"] for p in summary["problems"] if p["kind"] == "outputs"] == [False]


def test_outputs_differ_no_more_than_plain_decoding_from_itself(tmp_path: Path) -> None:
    plain = [answer(10.0 + k, index=k) for k in range(20)]
    other = [replace(r, text_sha256="else") if r.index % 4 == 0 else r for r in plain]
    runs = {
        ("plain", 0): RawRun(tuple(plain)), ("plain", 1): RawRun(tuple(other)),
        ("fast", 0): RawRun(tuple(other)), ("fast", 1): RawRun(tuple(plain)),
    }  # fmt: skip
    summary = summarise(write_folder(tmp_path / "f", open_loop(), runs))
    assert summary["outputs"]["control"]["different"] == 5
    found = summary["outputs"]["sides"]["fast"]
    assert (found["pairs"], found["different"], found["beyond_control"]) == (40, 10, False)
    (problem,) = [p for p in summary["problems"] if p["kind"] == "outputs"]
    assert not problem["fatal"]


def test_turns_after_one_that_differs_are_not_compared(tmp_path: Path) -> None:
    plain = [answer(10.0 + k + 0.4 * t, index=k, turn=t) for k in range(5) for t in range(3)]
    fast = [replace(r, text_sha256="else") if r.index == 2 and r.turn > 0 else r for r in plain]
    found = two_sides(tmp_path, open_loop(), plain, fast)["outputs"]["sides"]["fast"]
    assert (found["pairs"], found["different"]) == (14, 1)


def test_repeats_that_contradict_each_other_are_said(tmp_path: Path) -> None:
    """Twice as fast in one repeat, a little slower in the other."""
    plain = tuple(answer(10.0 + 0.5 * k, index=k) for k in range(60))
    fast = tuple(answer(10.0 + 0.25 * k, index=k) for k in range(120))
    slow = tuple(answer(10.0 + 0.52 * k, index=k) for k in range(57))
    runs = {
        ("plain", 0): RawRun(plain), ("plain", 1): RawRun(plain),
        ("fast", 0): RawRun(fast), ("fast", 1): RawRun(slow),
    }  # fmt: skip
    summary = summarise(write_folder(tmp_path / "f", closed(), runs))
    (found,) = summary["comparisons"]
    assert found["ratio_of_repeats"] == pytest.approx([2, 0.95], rel=0.01)
    assert found["verdict"] == "faster"
    (problem,) = [p for p in summary["problems"] if p["kind"] == "repeats"]
    assert not problem["fatal"]
    assert "not each of them (2.000, 0.950 times)" in problem["text"]


def open_loop_of_repeats(folder: Path, *less_s: float) -> dict[str, Any]:
    """The summary of a side that answers so much sooner than plain decoding in each repeat."""
    runs = {
        (side, repeat): RawRun(
            tuple(answer(10.0 + k, index=k, ttft_s=0.5 - factor * less) for k in range(20))
        )
        for side, factor in (("plain", 0), ("fast", 1))
        for repeat, less in enumerate(less_s)
    }
    return summarise(write_folder(folder / "f", open_loop(), runs))


@pytest.mark.parametrize(
    ("less_s", "verdict", "each"),
    [
        ((0.2, -0.05), "faster", "-200 ms, +50.0 ms end to end"),
        ((0.05, -0.2), "slower", "-50.0 ms, +200 ms end to end"),
    ],
)
def test_repeats_of_an_open_loop_that_contradict_its_verdict_are_said(
    tmp_path: Path, less_s: tuple[float, ...], verdict: str, each: str
) -> None:
    summary = open_loop_of_repeats(tmp_path, *less_s)
    (found,) = summary["comparisons"]
    assert (found["verdict"], found["by"]) == (verdict, "e2e_ms")
    differences = found["paired"]["e2e_ms"]["difference_of_repeats"]
    assert differences == pytest.approx([-1000 * less for less in less_s])
    (problem,) = [p for p in summary["problems"] if p["kind"] == "repeats"]
    assert not problem["fatal"]
    assert problem["text"] == (
        f"fast, 1 requests/s: all repeats together are {verdict} than plain, but not each of them"
        f" ({each}): more repeats, or longer ones, would tell."
    )


@pytest.mark.parametrize("less_s", [(0.2, 0.05), (-0.05, -0.2), (0.2, 0.0), (0.0, 0.0), (0.2,)])
def test_repeats_that_agree_are_no_problem(tmp_path: Path, less_s: tuple[float, ...]) -> None:
    """Control."""
    summary = open_loop_of_repeats(tmp_path, *less_s)
    assert summary["comparisons"][0]["verdict"] != "unknown"
    assert not [p for p in summary["problems"] if p["kind"] == "repeats"]


def test_differences_of_repeats_are_of_the_same_requests_of_the_same_repeat(tmp_path: Path) -> None:
    """Requests that one side alone answered do not count, nor do repeats that one alone has."""

    def run(first: int, ttft_s: float) -> RawRun:
        return RawRun(
            tuple(
                answer(10.0 + k, index=k, ttft_s=ttft_s + (9.0 if k >= 10 else 0.0))
                for k in range(first, first + 10)
            )
        )

    runs = {
        ("plain", 0): run(0, 0.2), ("plain", 1): run(0, 0.4), ("plain", 2): run(0, 0.2),
        ("fast", 0): run(5, 0.1), ("fast", 1): run(0, 0.1), ("fast", 2): run(10, 0.1),
        ("fast", 3): run(0, 0.1),
    }  # fmt: skip
    summary = summarise(write_folder(tmp_path / "f", open_loop(), runs))
    paired = summary["comparisons"][0]["paired"]
    for name in ("ttft_ms", "e2e_ms"):
        assert paired[name]["difference_of_repeats"] == pytest.approx([-100, -300])


@pytest.mark.parametrize("scenario", [closed(), open_loop()])
def test_sides_with_no_repeat_in_common_are_judged_all_the_same(
    tmp_path: Path, scenario: str
) -> None:
    runs = {
        ("plain", 0): RawRun(tuple(answer(10.0 + 0.5 * k, index=k) for k in range(60))),
        ("fast", 1): RawRun(
            tuple(answer(10.0 + 0.25 * k, index=k, ttft_s=0.05) for k in range(120))
        ),
    }
    summary = summarise(write_folder(tmp_path / "f", scenario, runs))
    (found,) = summary["comparisons"]
    assert found["verdict"] == "faster"
    assert found["ratio_of_repeats"] == found["paired"]["e2e_ms"]["difference_of_repeats"] == []
    assert not [p for p in summary["problems"] if p["kind"] == "repeats"]


def verdict_of(speed: Speed, plain: Speed, seed: int) -> str:
    """Two repeats of four users on either side, 30 s each."""
    phase = Phase(0, "4 users", 4, None, 0.0, 5.0, 35.0, None)
    cells = []
    for number, (side, its_speed) in enumerate({"plain": plain, f"side {seed}": speed}.items()):
        raw = [simulated(its_speed, [4], 35, 5, 100 * seed + 10 * number + r) for r in range(2)]
        runs = [Run(side, r, one.records, (), (), {}, {}) for r, one in enumerate(raw)]
        cell = Cell.of(side, phase, runs)
        assert cell is not None
        cells.append(cell)
    return str(compare(cells[1], cells[0])["verdict"])


def test_a_side_that_is_the_baseline_is_the_same_but_for_one_in_twenty() -> None:
    found = Counter(verdict_of(Speed(budget=3), Speed(budget=3), seed) for seed in range(40))
    assert found["same"] >= 34  # 38 of 40 are to be expected; fewer are seen once in 300 times


def test_a_tenth_faster_or_slower_is_found() -> None:
    """Control: that sameness is no matter of course."""
    plain, other = Speed(budget=3), Speed(base_s=0.0221, per_request_s=0.0036, budget=3)
    assert [verdict_of(other, plain, seed) for seed in range(5)] == ["faster"] * 5
    assert [verdict_of(plain, other, seed) for seed in range(5)] == ["slower"] * 5
