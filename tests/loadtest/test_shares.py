"""Workers together send what one would: each conversation once, as many users as asked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_scenarios import write_scenario

from specstack_loadtest.arrivals import arrivals_of, phases_of
from specstack_loadtest.scenario import Scenario
from specstack_loadtest.scenario_file import load_scenario
from specstack_loadtest.shares import (
    Clock,
    ClosedShare,
    Start,
    next_change_s,
    num_users,
    open_share,
    phase_at,
)

WORKERS = st.integers(1, 9)


def closed(users: list[int], stop: dict[str, float]) -> Scenario:
    load = {"kind": "closed", "users": tuple(users)}
    work = {"prompts": ("p",), "output_tokens": 4}
    return Scenario.model_validate(
        {"version": 1, "name": "t", "arrivals": load, "workload": work, "stop": stop}
    )


@given(users=st.integers(1, 40), num_workers=WORKERS)
def test_users_of_all_workers_are_the_phases(users: int, num_workers: int) -> None:
    (phase,) = phases_of(closed([users], {"seconds": 10}))
    parts = [num_users(phase, worker, num_workers) for worker in range(num_workers)]
    assert sum(parts) == users
    assert max(parts) - min(parts) <= 1


@given(requests=st.integers(1, 40), num_workers=WORKERS)
def test_each_conversation_of_a_closed_loop_is_handed_out_once(
    requests: int, num_workers: int
) -> None:
    scenario = closed([num_workers], {"requests": requests})
    found = []
    for worker in range(num_workers):
        share = ClosedShare(scenario, Start(0.0, worker, num_workers))
        while taken := share.take(1.0):
            assert share.take(1.0) is None, "one user, one seat"
            assert not share.is_done(1.0)
            share.leave()
            found.append(taken[1])
        assert share.is_done(1.0)
    assert sorted(found) == list(range(requests))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_workers_without_a_user_have_no_share(num_workers: int) -> None:
    """By requests: all that there are, and all workers are done."""
    found = []
    for worker in range(num_workers):
        share = ClosedShare(closed([2], {"requests": 8}), Start(0.0, worker, num_workers))
        assert share.is_done(0.0) == (worker >= 2)
        while taken := share.take(1.0):
            share.leave()
            found.append(taken[1])
        assert share.is_done(1.0)
    assert sorted(found) == list(range(8))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_a_phase_with_few_users_leaves_no_index_out(num_workers: int) -> None:
    """By seconds, one user and then four: the first questions are the same."""
    scenario = closed([1, 4], {"seconds": 10})
    shares = [ClosedShare(scenario, Start(0.0, w, num_workers)) for w in range(num_workers)]
    for now_s, number, num in ((1.0, 0, 6), (11.0, 1, 60)):
        found = []
        for _ in range(num):
            for share in shares:
                if taken := share.take(now_s):
                    assert taken[0].number == number
                    found.append(taken[1])
                    share.leave()
        assert sorted(found) == list(range(len(found)))
        assert len(found) == num * min(num_workers, (1, 4)[number])
    assert all(share.is_done(20.0) for share in shares)


def test_a_phase_counts_its_own_conversations() -> None:
    share = ClosedShare(closed([2, 1, 3], {"seconds": 10}), Start(0.0, 0, 1))
    assert share.take(-0.1) is None
    assert [share.take(t) for t in (0.0, 1.0, 2.0)] == [
        (share.phases[0], 0), (share.phases[0], 1), None,
    ]  # fmt: skip
    assert share.take(10.0) is None, "both seats are taken, and now there is one"
    share.leave()
    assert share.take(10.0) is None
    share.leave()
    assert share.take(10.5) == (share.phases[1], 0)
    assert share.take(20.0) == (share.phases[2], 0)
    assert not share.is_done(30.0)
    share.leave()
    share.leave()
    assert share.take(30.0) is None
    assert share.is_done(30.0)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_each_arrival_of_an_open_loop_has_one_worker(tmp_path: Path, num_workers: int) -> None:
    path = write_scenario(
        tmp_path, {"kind": "poisson", "rate": [3.0, 9.0]}, {"seconds": 20}, warmup={"seconds": 2}
    )
    scenario = load_scenario(path)
    found = [
        (arrival.phase.number, arrival.index, arrival.due_s)
        for worker in range(num_workers)
        for arrival in open_share(scenario, Start(0.0, worker, num_workers))
    ]
    expected = []
    for phase in phases_of(scenario):
        due_s = arrivals_of(scenario, phase)
        assert due_s is not None
        expected += [(phase.number, index, float(at)) for index, at in enumerate(due_s)]
    assert sorted(found) == expected


def test_an_open_share_is_in_order_of_time(tmp_path: Path) -> None:
    path = write_scenario(tmp_path, {"kind": "gamma", "rate": 9.0, "cv": 4}, {"seconds": 20})
    due_s = [arrival.due_s for arrival in open_share(load_scenario(path), Start(0.0, 1, 2))]
    assert due_s == sorted(due_s)


def test_phases_change_at_their_times() -> None:
    phases = phases_of(closed([1, 2], {"seconds": 10}))
    assert phase_at(phases, -0.1) is None
    assert phase_at(phases, 0.0) == phase_at(phases, 9.99) == phases[0]
    assert phase_at(phases, 10.0) == phases[1]
    assert phase_at(phases, 20.0) is None
    assert [next_change_s(phases, t) for t in (-1.0, 0.0, 10.0, 20.0)] == [0.0, 10.0, 20.0, None]


def test_a_number_of_requests_has_no_end_in_time() -> None:
    phases = phases_of(closed([1], {"requests": 3}))
    assert phase_at(phases, 1e6) == phases[0]
    assert next_change_s(phases, 0.0) is None


def test_the_clock_counts_from_the_epoch() -> None:
    clock = Clock(time.time() + 5.0)
    assert clock() == pytest.approx(-5.0, abs=0.05)
    before = clock()
    time.sleep(0.05)
    assert clock() - before == pytest.approx(0.05, abs=0.04)
