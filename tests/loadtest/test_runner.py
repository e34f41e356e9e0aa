"""One run, by Locust in a process of its own: what it sends, what it keeps, how it ends early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import MODEL, FakeServer, Log, Script, running_server
from small_scenarios import most_in_flight, records_of, write_scenario

from specstack_loadtest.arrivals import arrivals_of, phases_of
from specstack_loadtest.locust_process import child_environment, ended_by_signals
from specstack_loadtest.progress import Snapshot
from specstack_loadtest.records import RequestRecord
from specstack_loadtest.runner import LoadFailed, RunOutcome, run_once
from specstack_loadtest.scenario_file import load_scenario
from specstack_loadtest.server import OptOutUnknown, RemoteRefused, ServerUnusable
from specstack_loadtest.workload import Workload

CLOSED = {"kind": "closed", "users": [2, 5, 1]}
LATE_S = 0.05

pytestmark = pytest.mark.timing


def run(scenario: Path, script: Script, folder: Path, **options: Any) -> tuple[RunOutcome, Log]:
    with running_server(script, folder / "server") as server:
        outcome = run_once(scenario, server.url, folder / "run", **options)
        return outcome, server.log


class ClosedRun:
    """Phases of a closed loop, and what came of them."""

    def __init__(self, folder: Path) -> None:
        self.scenario = write_scenario(
            folder, CLOSED, {"seconds": 3}, warmup={"seconds": 1}, max_tokens=6
        )
        (folder / "run").mkdir()
        (folder / "run" / "requests-7.jsonl").write_text("of a run that was killed\n")
        (folder / "run" / "notes.json").write_text("{}")
        self.snapshots: list[Snapshot] = []
        script = Script(first_s=(0.06, 0.1), gap_s=(0.01,))
        self.outcome, self.log = run(
            self.scenario, script, folder, on_progress=self.snapshots.append
        )
        self.folder = folder / "run"
        self.records = records_of(self.folder)

    def of_phase(self, number: int) -> list[RequestRecord]:
        return [record for record in self.records if record.phase == number]


@pytest.fixture(scope="module")
def closed_run(tmp_path_factory: pytest.TempPathFactory) -> ClosedRun:
    return ClosedRun(tmp_path_factory.mktemp("closed"))


def test_a_run_is_complete(closed_run: ClosedRun) -> None:
    outcome = closed_run.outcome
    assert (outcome.complete, outcome.reason, outcome.interrupted) == (True, "", False)
    assert outcome.num_errors == {}
    assert outcome.num_requests == len(closed_run.records) > 60
    assert (outcome.model, outcome.dialect) == (MODEL, "sglang")
    assert 8.9 < outcome.seconds < 10
    assert abs(time.time() - outcome.epoch) < 600
    assert json.loads((closed_run.folder / "run.json").read_text())["complete"] is True


def test_a_run_leaves_its_files_alone(closed_run: ClosedRun) -> None:
    names = {path.name for path in closed_run.folder.iterdir()}
    assert names == {
        "requests.jsonl", "client.jsonl", "metrics.jsonl", "server.json", "run.json", "locust.log",
        "notes.json",
    }  # fmt: skip
    server = json.loads((closed_run.folder / "server.json").read_text())
    assert server["specstack"] == {"plan_hash": "abc"}
    for name, keys in (
        ("client", {"t_s", "worker", "lag_s", "cpu", "in_flight"}),
        ("metrics", {"t_s", "values"}),
    ):
        lines = (closed_run.folder / f"{name}.jsonl").read_text().splitlines()
        times = [json.loads(line)["t_s"] for line in lines]
        assert times == sorted(times)
        assert len(times) >= 8
        assert all(json.loads(line).keys() == keys for line in lines)
    first = json.loads((closed_run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["t_s"]) < 0.5, "counters are known before the load begins"


def test_records_are_sorted_and_indices_have_no_gap(closed_run: ClosedRun) -> None:
    identities = [record.identity for record in closed_run.records]
    assert identities == sorted(set(identities))
    for phase in range(3):
        indices = [record.index for record in closed_run.of_phase(phase)]
        assert indices == list(range(len(indices)))


def test_requests_are_sent_in_their_phase_by_its_users(closed_run: ClosedRun) -> None:
    phases = phases_of(load_scenario(closed_run.scenario))
    for phase, users in zip(phases, (2, 5, 1), strict=True):
        records = closed_run.of_phase(phase.number)
        assert most_in_flight(records) == users
        due = np.array([record.due_s for record in records])
        assert phase.ends_s is not None
        assert phase.starts_s <= due.min() < phase.starts_s + 0.3, "users come in time"
        assert due.max() < phase.ends_s
        assert all(r.warmup == (r.due_s < phase.starts_s + 1) for r in records)
    assert most_in_flight(closed_run.records) == 5, "never more, also between phases"


def test_a_user_sends_again_as_soon_as_it_is_answered(closed_run: ClosedRun) -> None:
    alone = sorted(closed_run.of_phase(2), key=lambda record: record.due_s)[1:]
    waits = [after.sent_s - before.end_s for before, after in pairwise(alone)]
    assert min(waits) >= 0
    assert np.median(waits) < 0.01
    assert np.median([r.sent_s - r.due_s for r in closed_run.records]) < 0.005


def test_what_is_asked_is_the_workloads(closed_run: ClosedRun) -> None:
    workload, came = Workload(load_scenario(closed_run.scenario)), closed_run.log.by_seed()
    assert len(came) == len(closed_run.records)
    for record in closed_run.records:
        (turn,) = workload.request(record.phase, record.index).turns
        body = came[turn.seed]["body"]
        assert body["messages"] == list(turn.messages)
        assert (body["max_tokens"], body["temperature"]) == (turn.max_tokens, turn.temperature)


def test_progress_is_told(closed_run: ClosedRun) -> None:
    snapshots = closed_run.snapshots
    assert len(snapshots) > 20
    assert {snapshot.phase for snapshot in snapshots} == {None, 0, 1, 2}
    last = snapshots[-1]
    assert last.num_done >= len(closed_run.records) - 5
    assert last.num_errors == 0
    assert last.draft_budget == 4
    assert max(snapshot.num_in_flight or 0 for snapshot in snapshots) in range(1, 6)
    assert last.ttft_p50_s == pytest.approx(0.08, abs=0.03)
    assert any((snapshot.tokens_per_s or 0) > 20 for snapshot in snapshots)


def test_it_ends_after_a_number_of_requests(tmp_path: Path) -> None:
    scenario = write_scenario(
        tmp_path, {"kind": "closed", "users": 3}, {"requests": 10}, warmup={"requests": 4}
    )
    outcome, log = run(scenario, Script(), tmp_path, opt_out=True)
    records = records_of(tmp_path / "run")
    assert outcome.complete
    assert [record.index for record in records] == list(range(10))
    assert [record.warmup for record in records] == [n < 4 for n in range(10)]
    asked = {json.dumps(request["body"]["custom_params"]) for request in log.requests}
    assert asked == {'{"specstack": {"speculate": false}}'}


def test_turns_follow_the_answers_before_them(tmp_path: Path) -> None:
    scenario = write_scenario(
        tmp_path, {"kind": "poisson", "rate": 4.0}, {"seconds": 4},
        workload={"turns": 3, "think_s": 0.3},
    )  # fmt: skip
    outcome, log = run(scenario, Script(), tmp_path)
    assert outcome.complete
    records = {record.identity: record for record in records_of(tmp_path / "run")}
    workload, came = Workload(load_scenario(scenario)), log.by_seed()
    assert {turn for _, _, turn in records} == {0, 1, 2}
    for (phase, index, number), record in records.items():
        turns = workload.request(phase, index).turns
        messages = came[turns[number].seed]["body"]["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * number + ["user"]
        assert messages[-1] == turns[number].messages[0]
        if number:
            before = records[phase, index, number - 1]
            assert record.due_s == pytest.approx(before.end_s + 0.3, abs=1e-5)
            assert record.due_s < 4.0, "nothing is due after the end"
            assert messages[-2]["content"] == "w0 w1 w2 w3 w4 w5 "


def test_open_arrivals_come_at_their_times(tmp_path: Path) -> None:
    """Bursts, from a server that is slower than they come."""
    scenario = write_scenario(tmp_path, {"kind": "gamma", "rate": 12.0, "cv": 4.0}, {"seconds": 5})
    outcome, log = run(scenario, Script(first_s=(1.0,)), tmp_path)
    assert outcome.complete
    records = records_of(tmp_path / "run")
    (phase,) = phases_of(load_scenario(scenario))
    due_s = arrivals_of(load_scenario(scenario), phase)
    assert due_s is not None
    assert [record.due_s for record in records] == [round(float(at), 6) for at in due_s]
    late = np.array([record.sent_s - record.due_s for record in records])
    assert late.min() >= -1e-6
    assert np.median(late) < 0.01
    assert np.percentile(late, 90) < LATE_S
    workload, came = Workload(load_scenario(scenario)), log.by_seed()
    epoch = time.monotonic() - time.time() + outcome.epoch
    for record in records:
        (turn,) = workload.request(0, record.index).turns
        assert came[turn.seed]["at"] - epoch >= record.due_s - 0.005, "not before it was due"


def test_a_server_that_dies_ends_the_run_with_what_came_before(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, {"kind": "closed", "users": 3}, {"seconds": 60})
    outcome, _ = run(scenario, Script(dies_at_s=2.0, gap_s=(0.05,)), tmp_path)
    records = records_of(tmp_path / "run")
    assert not outcome.complete
    assert not outcome.interrupted
    assert "was gone" in outcome.reason
    assert outcome.seconds < 15, "not the minute that was asked for"
    assert outcome.num_errors["disconnect"] == 3, "what was in flight"
    assert 3 <= outcome.num_errors["connect"] < 40, "not hammered"
    whole = [record for record in records if record.error is None]
    assert len(whole) > 5
    assert max(record.end_s for record in whole) < 2.5


@pytest.mark.parametrize("after_s", [-0.5, 2.0])
def test_an_interruption_keeps_what_there_is(tmp_path: Path, after_s: float) -> None:
    """By Ctrl-C, which comes out of whatever the main thread does."""

    def interrupt(snapshot: Snapshot) -> None:
        if snapshot.seconds >= after_s:
            raise KeyboardInterrupt

    scenario = write_scenario(tmp_path, {"kind": "closed", "users": 2}, {"seconds": 60})
    script = Script(gap_s=(0.2,))
    outcome, log = run(scenario, script, tmp_path, on_progress=interrupt)
    records = records_of(tmp_path / "run")
    assert (outcome.complete, outcome.interrupted) == (False, True)
    assert outcome.seconds < 10
    if after_s > 0:
        assert outcome.num_errors == {"cancelled": 2}
        assert len(records) == len(log.requests) > 2
        assert all(record.chunk_s for record in records if record.error is None)


def test_each_run_finds_an_empty_cache(tmp_path: Path) -> None:
    """Both sides of a comparison can be one server."""
    scenario = write_scenario(tmp_path, {"kind": "closed", "users": 2}, {"requests": 4})
    with running_server(Script(flush_codes=(400, 200)), tmp_path / "server") as server:
        outcomes = [
            run_once(scenario, server.url, tmp_path / f"run{side}", opt_out=side == 1)
            for side in (0, 1)
        ]
        log = server.log
    assert [outcome.cache_flushed for outcome in outcomes] == [True, True]
    assert json.loads((tmp_path / "run1" / "run.json").read_text())["cache_flushed"] is True
    came = [one["at"] for one in log.requests]
    emptied = [one["at"] for one in log.flushes if one["code"] == 200]
    assert len(came) == 8
    assert emptied[0] < came[0]
    assert came[3] < emptied[1] < came[4]
    assert len(emptied) == 2


def test_a_cache_that_stays_is_told(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, {"kind": "closed", "users": 2}, {"requests": 4})
    for name, script in (("a", Script(owned_by="vllm")), ("b", Script(flush_codes=(403,)))):
        outcome, log = run(scenario, script, tmp_path / name)
        assert outcome.complete
        assert not outcome.cache_flushed
        assert len(log.flushes) == (1 if name == "b" else 0)


def test_errors_are_counted_and_the_load_goes_on(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, {"kind": "poisson", "rate": 10.0}, {"seconds": 3})
    faults = {"1": "http_503", "4": "server_error", "9": "hang"}
    scenario.write_text(scenario.read_text().replace("timeout_s: 20", "timeout_s: 2"))
    outcome, _ = run(scenario, Script(faults=faults, gap_s=(0.2,)), tmp_path)
    assert outcome.complete
    assert outcome.num_errors == {"http_503": 1, "server_error": 1, "timeout": 1}
    (silent,) = [r for r in records_of(tmp_path / "run") if r.error == "timeout"]
    assert silent.end_s - silent.sent_s == pytest.approx(2.0, abs=0.15), "not from the last chunk"
    assert len(silent.chunk_s) == 1


def test_a_run_needs_a_server_that_may_be_loaded(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, CLOSED, {"seconds": 3})
    folder = tmp_path / "run"
    with pytest.raises(RemoteRefused):
        run_once(scenario, "http://10.0.0.5:1", folder)
    with pytest.raises(ServerUnusable):
        run_once(scenario, "http://127.0.0.1:9", folder)
    with (
        running_server(Script(owned_by="vllm"), tmp_path / "server") as server,
        pytest.raises(OptOutUnknown),
    ):
        run_once(scenario, server.url, folder, opt_out=True)
    assert not folder.exists()


BROKEN = """
from specstack_loadtest import user

whole = user.Workload.request

def broken(self, phase, index):
    if index == 3:
        raise RuntimeError("a bug of the client")
    return whole(self, phase, index)

user.Workload.request = broken
from specstack_loadtest.locustfile import *
"""


@pytest.mark.parametrize("kind", ["closed", "poisson"])
def test_a_bug_of_the_client_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever it breaks, the run is not complete, and says why."""
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.setattr("specstack_loadtest.locust_process.LOCUSTFILE", tmp_path / "broken.py")
    load = {"kind": kind, **({"users": 2} if kind == "closed" else {"rate": 6.0})}
    outcome, _ = run(write_scenario(tmp_path, load, {"seconds": 2}), Script(), tmp_path)
    indices = {record.index for record in records_of(tmp_path / "run")}
    assert not outcome.complete
    assert "the client failed: a bug of the client" in outcome.reason
    assert 3 not in indices
    assert max(indices) > 3


def test_what_locust_says_is_told_when_it_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specstack_loadtest.locust_process.LOCUSTFILE", tmp_path / "none.py")
    scenario = write_scenario(tmp_path, CLOSED, {"seconds": 3})
    with (
        running_server(Script(), tmp_path / "server") as server,
        pytest.raises(LoadFailed, match=r"Could not find .*none\.py"),
    ):
        run_once(scenario, server.url, tmp_path / "run")


PARENT = """
import sys
from contextlib import nullcontext
from pathlib import Path
from specstack_loadtest import locust_process
from specstack_loadtest.locust_process import ended_by_signals
from specstack_loadtest.runner import run_once

scenario, url, folder, locustfile, num_workers, minds = sys.argv[1:]
if locustfile:
    locust_process.LOCUSTFILE = Path(locustfile)
with ended_by_signals() if minds else nullcontext():
    outcome = run_once(Path(scenario), url, Path(folder), num_workers=int(num_workers))
print(outcome.reason)
"""
OUTLIVES = """
from specstack_loadtest import locust_process

locust_process.end_with_starter = lambda: None
from specstack_loadtest.locustfile import *
"""


@contextmanager
def sending(
    folder: Path,
    server: FakeServer,
    *,
    num_workers: int = 1,
    outlives: bool = False,
    minds: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a load for a minute, which is under way; nothing of it is left behind.

    Args:
        outlives: its Locust does not care what becomes of it.
        minds: it ends by signals.
    """  # fmt: skip
    scenario = write_scenario(folder, {"kind": "closed", "users": 4}, {"seconds": 60})
    (folder / "outlives.py").write_text(OUTLIVES)
    arguments = (
        str(scenario), server.url, str(folder / "run"),
        str(folder / "outlives.py") if outlives else "", str(num_workers), "yes" if minds else "",
    )  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        env=child_environment(), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        locust: list[str] = []
        try:
            deadline = time.monotonic() + 60
            while len(server.log.requests) < 20:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            locust = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(locust) == 1
            yield process
        finally:
            process.kill()
            for pid in locust:
                with suppress(ProcessLookupError):
                    os.killpg(int(pid), signal.SIGKILL)


def num_sent_later(server: FakeServer) -> int:
    """How many requests come in a while that begins soon."""
    time.sleep(1.0)
    before = len(server.log.requests)
    time.sleep(1.5)
    return len(server.log.requests) - before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
@pytest.mark.parametrize("outlives", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_nothing_is_sent_when_the_parent_is_gone(
    tmp_path: Path, num_workers: int, outlives: bool
) -> None:
    with (
        running_server(Script(), tmp_path / "server") as server,
        sending(tmp_path, server, num_workers=num_workers, outlives=outlives) as parent,
    ):
        parent.kill()
        parent.wait()
        assert (num_sent_later(server) > 0) is outlives


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("minds", [True, False])
def test_a_signal_ends_a_run_that_keeps_what_it_has(
    tmp_path: Path, number: signal.Signals, minds: bool
) -> None:
    with (
        running_server(Script(), tmp_path / "server") as server,
        sending(tmp_path, server, minds=minds) as parent,
    ):
        parent.send_signal(number)
        said, _ = parent.communicate(timeout=20)
        assert num_sent_later(server) == 0
        num_sent = len(server.log.requests)
    if minds:
        assert (parent.returncode, said) == (0, "interrupted\n")
        assert len(records_of(tmp_path / "run")) == num_sent
    else:
        assert (parent.returncode, said) == (-number, "")
        assert not (tmp_path / "run" / "run.json").exists()


def test_a_signal_that_comes_twice_is_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with ended_by_signals():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)  # what is cleaned up then is not disturbed
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
    monkeypatch.setattr("specstack_loadtest.locust_process.SAME_WISH_S", 0.0)
    with ended_by_signals():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)


def test_signals_that_are_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_left_alone_outside_of_the_main_thread() -> None:
    found: list[object] = []

    def enter() -> None:
        with ended_by_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
