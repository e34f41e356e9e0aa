"""Coordinated omission: a server that stalls is seen by everybody who would have come meanwhile.

Open loops send on during a stall, and count from when a request was due. A closed loop, the
control, is held up by the stall itself: it sees as many slow requests as it has users.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import Log, Script, running_server
from small_scenarios import records_of, write_scenario

from specstack_loadtest.records import RequestRecord
from specstack_loadtest.runner import run_once
from specstack_loadtest.scenario_file import load_scenario
from specstack_loadtest.workload import Workload

FIRST_S, BEGINS_S, STALL_S, RATE = 0.05, 2.0, 2.0, 15.0
SLOW_S = 0.3
"""More than any request takes without a stall."""

pytestmark = pytest.mark.timing


class Stalled:
    """A run of 6 s over a stall, and what the server noted, in seconds since the run's epoch."""

    def __init__(self, folder: Path, arrivals: dict[str, Any]) -> None:
        script = Script(first_s=(FIRST_S,), gap_s=(0.005,), stall_s=(BEGINS_S, BEGINS_S + STALL_S))
        path = write_scenario(folder, arrivals, {"seconds": 6}, max_tokens=3)
        with running_server(script, folder / "server") as server:
            outcome = run_once(path, server.url, folder / "run")
            log: Log = server.log
        assert outcome.complete
        assert outcome.num_errors == {}
        self.records: list[RequestRecord] = records_of(folder / "run")
        epoch = time.monotonic() - time.time() + outcome.epoch
        workload, came, chunks = Workload(load_scenario(path)), log.by_seed(), log.chunks
        seeds = [workload.request(0, record.index).turns[0].seed for record in self.records]
        self.came_s = np.array([came[seed]["at"] - epoch for seed in seeds])
        self.written_s = np.array([chunks[came[seed]["number"]][0] - epoch for seed in seeds])
        self.due_s = np.array([record.due_s for record in self.records])
        self.sent_s = np.array([record.sent_s for record in self.records])
        self.ttft_s = np.array([record.chunk_s[0] for record in self.records]) - self.due_s
        self.stall_ends_s = self.came_s.min() + BEGINS_S + STALL_S


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Stalled:
    return Stalled(tmp_path_factory.mktemp("open"), {"kind": "poisson", "rate": RATE})


def test_latencies_are_those_that_the_server_caused(stalled: Stalled) -> None:
    """Request by request, from when it was due to when its first chunk was written."""
    errors = stalled.ttft_s - (stalled.written_s - stalled.due_s)
    assert errors.min() > -0.005
    assert np.median(errors) < 0.010
    assert np.percentile(errors, 95) < 0.050


def test_all_who_come_during_a_stall_wait_for_its_end(stalled: Stalled) -> None:
    """Each for what was left of it."""
    ends_s = stalled.stall_ends_s
    answered = stalled.came_s + FIRST_S
    held = (answered >= ends_s - STALL_S) & (answered < ends_s)
    waited = stalled.ttft_s[held]
    left = ends_s - stalled.due_s[held]
    assert (waited > left - 0.010).all()
    assert np.median(waited - left) < 0.050
    expected = RATE * STALL_S
    assert abs(len(waited) - expected) < 4 * expected**0.5
    assert waited.min() < SLOW_S
    assert waited.max() > STALL_S - SLOW_S
    assert (stalled.ttft_s > SLOW_S).sum() > expected / 2


def test_a_stall_delays_no_request(stalled: Stalled) -> None:
    late = stalled.sent_s - stalled.due_s
    assert late.min() > -1e-6
    assert np.median(late) < 0.010
    assert np.percentile(late, 95) < 0.050
    assert np.median(stalled.came_s - stalled.due_s) < 0.015, "the server saw them come, too"


def test_a_closed_loop_sees_a_stall_once_per_user(tmp_path: Path) -> None:
    """Control: the same server, the same stall, which may also fall between two chunks."""
    closed = Stalled(tmp_path, {"kind": "closed", "users": 3})
    assert len(closed.records) > 40
    took_s = np.array([record.end_s for record in closed.records]) - closed.due_s
    assert (took_s > STALL_S / 2).sum() == 3
