"""Arrivals: phases one after the other, and due times that follow the laws they are named after."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from specstack_loadtest.arrivals import Phase, arrivals_of, phases_of
from specstack_loadtest.scenario import SHIPPED, Scenario
from specstack_loadtest.scenario_file import load_scenario

NEVER_BY_CHANCE = 5.0
"""Standard deviations."""


def scenario(arrivals: dict[str, Any], *, seed: int = 0, **others: Any) -> Scenario:
    data: dict[str, Any] = {
        "version": 1,
        "name": "test",
        "arrivals": arrivals,
        "workload": {"prompts": ["p.jsonl"], "output_tokens": 16},
        "stop": {"seconds": 10.0},
        "seed": seed,
    }
    return Scenario.model_validate({**data, **others})


def due(one: Scenario, number: int = 0) -> NDArray[np.float64]:
    times = arrivals_of(one, phases_of(one)[number])
    assert times is not None
    return times


def _p_value(gaps: NDArray[np.float64], law: Any) -> float:
    """Kolmogorov and Smirnov's, of the gaps above a microsecond.

    Bursts have shorter ones, down to zero where the times of a long run are not that exact.
    """
    least = 1e-6
    beyond = law.sf(least)
    return float(
        stats.kstest(
            gaps[gaps > least], lambda gap: (law.cdf(gap) - law.cdf(least)) / beyond
        ).pvalue
    )


def test_levels_are_phases_one_after_the_other() -> None:
    one = scenario({"kind": "closed", "users": [1, 16]}, stop={"seconds": 48.0},
                   warmup={"seconds": 8.0})  # fmt: skip
    assert phases_of(one) == (
        Phase(0, "1 user", 1, None, 0.0, 8.0, 48.0, None),
        Phase(1, "16 users", 16, None, 48.0, 8.0, 48.0, None),
    )
    assert [phase.ends_s for phase in phases_of(one)] == [48.0, 96.0]


def test_rates_of_several_turns_count_conversations() -> None:
    workload = {"prompts": ["p.jsonl"], "output_tokens": 16, "turns": 2}
    one = scenario({"kind": "poisson", "rate": 0.5}, workload=workload)
    assert phases_of(one)[0].name == "0.5 conversations/s"


def test_a_phase_by_requests_has_no_end_in_time() -> None:
    one = scenario({"kind": "closed", "users": 2}, stop={"requests": 8}, warmup={"requests": 2})
    assert phases_of(one) == (Phase(0, "2 users", 2, None, 0.0, 0.0, None, 8, 2),)
    assert phases_of(one)[0].ends_s is None


def test_a_warmup_ends_after_its_seconds_or_its_requests() -> None:
    by_time = Phase(1, "", None, 2.0, 10.0, 3.0, 10.0, None)
    assert [by_time.is_warmup(0, at) for at in (10.0, 12.9, 13.0)] == [True, True, False]
    by_count = Phase(0, "", 2, None, 0.0, 0.0, None, 8, 2)
    assert [by_count.is_warmup(index, 0.0) for index in (0, 1, 2)] == [True, True, False]


def test_open_loops_are_named_after_their_rate() -> None:
    one = scenario({"kind": "poisson", "rate": [0.5, 2]})
    assert [(p.name, p.rate, p.users) for p in phases_of(one)] == [
        ("0.5 requests/s", 0.5, None),
        ("2 requests/s", 2.0, None),
    ]


def test_a_closed_loop_has_no_arrivals() -> None:
    one = scenario({"kind": "closed", "users": 2})
    assert arrivals_of(one, phases_of(one)[0]) is None


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        ({"kind": "poisson", "rate": 5}, 1.0),
        ({"kind": "gamma", "rate": 5, "cv": 3}, 3.0),
        ({"kind": "gamma", "rate": 5, "cv": 0.5}, 0.5),
    ],
)
def test_gaps_follow_their_law(arrivals: dict[str, Any], cv: float) -> None:
    times = due(scenario(arrivals, stop={"requests": 20_001}))
    gaps = np.diff(times)
    law = stats.gamma(cv**-2, scale=cv**2 / 5)
    assert gaps.mean() == pytest.approx(0.2, abs=NEVER_BY_CHANCE * cv * 0.2 / math.sqrt(20_000))
    assert _p_value(gaps, law) > 1e-6
    assert _p_value(gaps, stats.gamma(1.2 * cv**-2, scale=cv**2 / 6)) < 1e-6  # control


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_a_window_has_its_rate_times_its_length_on_average(cv: float) -> None:
    """From the start on: the process is stationary."""
    num, rate, seconds = 3_000, 2.0, 10.0
    arrivals = {"kind": "gamma", "rate": rate, "cv": cv}
    one = scenario(arrivals, stop={"seconds": seconds})
    counts = [len(due(one.model_copy(update={"seed": seed}))) for seed in range(num)]
    error = np.std(counts) / math.sqrt(num)
    assert np.mean(counts) == pytest.approx(rate * seconds, abs=NEVER_BY_CHANCE * error)


def test_a_process_that_begins_with_a_whole_gap_is_noticed() -> None:
    """Control: it brings (cv^2 - 1) / 2 = 4 requests too many, which the test above would see."""
    random = np.random.default_rng(0)
    gaps = random.gamma(1 / 9, 9 / 2.0, (3_000, 400))
    counts = (np.cumsum(gaps, axis=1) < 10.0).sum(axis=1)
    error = counts.std() / math.sqrt(3_000)
    assert counts.mean() > 20 + NEVER_BY_CHANCE * error


def test_times_lie_in_their_phase_and_rise() -> None:
    one = scenario({"kind": "gamma", "rate": [2, 2], "cv": 3}, stop={"seconds": 50.0})
    for number, (start, end) in enumerate([(0.0, 50.0), (50.0, 100.0)]):
        times = due(one, number)
        assert len(times) > 10
        assert start <= times[0]
        assert times[-1] < end
        assert (np.diff(times) >= 0).all()


def test_more_gaps_than_are_drawn_at_once_are_no_others() -> None:
    arrivals = {"kind": "poisson", "rate": 5}
    few, many = (due(scenario(arrivals, stop={"requests": num})) for num in (100, 10_000))
    assert len(many) == 10_000
    np.testing.assert_array_equal(few, many[:100])


def test_times_are_the_same_again_and_others_with_another_seed_or_phase() -> None:
    arrivals = {"kind": "poisson", "rate": [5, 5]}
    one, again, other = (due(scenario(arrivals, seed=seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert one[0] != other[0]
    assert abs(due(scenario(arrivals), 1)[0] - 10.0 - one[0]) > 1e-3


def test_a_trace_comes_at_its_own_times_scaled(tmp_path: Path) -> None:
    rows = ["03.0,1,1", "04.0,1,1", "09.5,1,1", "06.0,1,1"]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:{row}" for row in rows]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    trace = {"kind": "trace", "file": "t.csv"}

    def times(stop: dict[str, Any], **options: Any) -> list[float]:
        one = scenario({**trace, **options}, stop=stop, folder=str(tmp_path))
        return due(one).tolist()

    assert times({"requests": 4}) == [0.0, 1.0, 3.0, 6.5]
    assert times({"requests": 4}, scale_time=0.5) == [0.0, 0.5, 1.5, 3.25]
    assert times({"requests": 2}, skip=1) == [0.0, 2.0]
    assert times({"seconds": 3.0}) == [0.0, 1.0]


@pytest.mark.parametrize("name", ["azure_code.csv", "azure_conv.csv"])
def test_shipped_traces_can_be_replayed_whole(name: str) -> None:
    trace = {"kind": "trace", "file": f"traces/{name}"}
    assert len(due(scenario(trace, stop={"requests": 300}, folder=str(SHIPPED)))) == 300


def test_the_shipped_trace_is_replayed_as_recorded() -> None:
    one = load_scenario("code-burst")
    times = due(one)
    assert len(times) == 110
    assert times[1] == pytest.approx(0.961, abs=1e-3)  # ten times from 07.0418 s to 07.1379 s
