"""Several workers send what one would; and Locust's own ways to run: its web interface."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import FakeServer, Script, running_server
from small_scenarios import most_in_flight, records_of, write_scenario

from specstack_loadtest.locust_process import LOCUSTFILE, child_environment
from specstack_loadtest.runner import RunOutcome, run_once

OPEN = {"kind": "poisson", "rate": [8.0, 16.0]}
CLOSED = {"kind": "closed", "users": [1, 3]}

pytestmark = pytest.mark.timing


class Ran:
    """A scenario, run by some workers."""

    def __init__(self, folder: Path, arrivals: dict[str, Any], num_workers: int) -> None:
        scenario = write_scenario(folder, arrivals, {"seconds": 3})
        with running_server(Script(), folder / "server") as server:
            self.outcome: RunOutcome = run_once(
                scenario, server.url, folder / "run", num_workers=num_workers
            )
            self.bodies = {seed: request["body"] for seed, request in server.log.by_seed().items()}
        self.records = records_of(folder / "run")
        lines = (folder / "run" / "client.jsonl").read_text().splitlines()
        self.sampled = {json.loads(line)["worker"] for line in lines}


def test_two_workers_send_what_one_sends(tmp_path: Path) -> None:
    one, two = (Ran(tmp_path / str(n), OPEN, n) for n in (1, 2))
    assert one.outcome.complete
    assert two.outcome.complete
    assert {record.worker for record in two.records} == two.sampled == {0, 1}
    assert all(record.worker == record.index % 2 for record in two.records)
    assert [r.identity for r in one.records] == [r.identity for r in two.records]
    assert [r.due_s for r in one.records] == [r.due_s for r in two.records]
    assert one.bodies == two.bodies
    late = sorted(record.sent_s - record.due_s for record in two.records)
    assert late[len(late) // 2] < 0.01


def test_workers_share_the_users_of_a_closed_loop(tmp_path: Path) -> None:
    ran = Ran(tmp_path, CLOSED, 2)
    assert ran.outcome.complete
    assert ran.outcome.num_workers == 2
    for phase, users in enumerate((1, 3)):
        records = [record for record in ran.records if record.phase == phase]
        assert most_in_flight(records) == users
        for worker in {record.worker for record in records}:
            indices = sorted(r.index for r in records if r.worker == worker)
            sending = min(2, users)
            assert indices == list(range(worker, worker + sending * len(indices), sending))
    assert most_in_flight(ran.records) == 3


def test_more_workers_than_users_end(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, {"kind": "closed", "users": 2}, {"requests": 8})
    with running_server(Script(), tmp_path / "server") as server:
        outcome = run_once(scenario, server.url, tmp_path / "run", num_workers=4)
    assert outcome.complete
    assert [record.index for record in records_of(tmp_path / "run")] == list(range(8))


def test_a_worker_that_dies_is_said(tmp_path: Path) -> None:
    """What it sent before is kept, and the others go on."""
    scenario = write_scenario(tmp_path, {"kind": "poisson", "rate": 10.0}, {"seconds": 5})
    killed: list[int] = []

    def kill(snapshot: Any) -> None:
        if snapshot.seconds > 1.5 and not killed:
            killed.append(_newest_child(_locust_child(os.getpid())))
            os.kill(killed[0], signal.SIGKILL)

    with running_server(Script(), tmp_path / "server") as server:
        outcome = run_once(scenario, server.url, tmp_path / "run", num_workers=2, on_progress=kill)
    assert not outcome.complete
    assert "ended early" in outcome.reason
    records = records_of(tmp_path / "run")
    last = {w: max(r.due_s for r in records if r.worker == w) for w in (0, 1)}
    assert min(last.values()) < 3.0
    assert max(last.values()) > 3.5


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def _locust_child(pid: int) -> int:
    names = {p: Path(f"/proc/{p}/cmdline").read_text() for p in _children(pid)}
    return next(p for p, name in names.items() if "locust" in name)


def _newest_child(pid: int) -> int:
    return max(_children(pid))


@contextmanager
def web_interface(url: str, scenario: Path, *options: str) -> Iterator[str]:
    """Locust as a user starts it; yields the address of its page."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--scenario", str(scenario),
        "--host", url, "--web-host", "127.0.0.1", "--web-port", str(port), *options,
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=scenario.parent, env=child_environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            print(process.communicate()[0])


def asked(address: str, path: str, **form: str) -> Any:
    deadline = time.monotonic() + 30
    while True:
        try:
            with httpx.Client(trust_env=False, timeout=10) as http:
                page = http.post(address + path, data=form) if form else http.get(address + path)
            return page.raise_for_status().json()
        except httpx.TransportError:
            assert time.monotonic() < deadline, "no page"
            time.sleep(0.2)


def counted(address: str, server: FakeServer, num: int) -> dict[str, int]:
    """Requests by row of Locust's table, when the server has got `num` and the run has ended."""
    deadline = time.monotonic() + 30
    while True:
        found = asked(address, "/stats/requests")
        if len(server.log.requests) >= num and found["state"] == "stopped":
            assert all(row["num_failures"] == 0 for row in found["stats"])
            return {row["name"]: row["num_requests"] for row in found["stats"]}
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_the_web_interface_runs_a_scenario_again_and_again(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, {"kind": "closed", "users": 2}, {"requests": 6})
    with (
        running_server(Script(), tmp_path / "server") as server,
        web_interface(server.url, scenario) as address,
    ):
        assert asked(address, "/stats/requests")["state"] == "ready"
        for run in (1, 2):
            assert asked(address, "/swarm", host=server.url)["success"]
            rows = counted(address, server, 6 * run)
            assert rows["chat"] == rows["ttft"] == rows["tpot"] == 6
            assert len(server.log.requests) == 6 * run
    assert not list(tmp_path.glob("requests*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scenario", "smok"), "did you mean 'smoke'"),
        (("--host", "http://10.0.0.5:1"), "is not on this machine"),
        (("--host", "http://127.0.0.1:9"), "no server answers"),
    ],
)
def test_locust_says_what_is_wrong(tmp_path: Path, options: tuple[str, str], words: str) -> None:
    scenario = write_scenario(tmp_path, CLOSED, {"seconds": 3})
    ran = subprocess.run(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless",
         "--scenario", str(scenario), *options],
        env=child_environment(),
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode != 0
    assert words in ran.stdout + ran.stderr
