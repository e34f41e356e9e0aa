"""A server for the length of a block, with a stub in the engine's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from specstack.plan import Plan, plan_file
from specstack.processes import free_port
from specstack_serving import launch
from specstack_serving.carrier import PLAN_VARIABLE
from specstack_serving.launch import ServerFailed, running_server

SPEC = Path(__file__).parents[2] / "dsl" / "specs" / "quickstart.yaml"
STUB = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
plan = json.loads(os.environ["SPECSTACK_PLAN"])["engine"]
print("stub", os.getpid(), os.environ.get("EXTRA"), flush=True)
busy = time.monotonic() + 0.5
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > busy else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
HTTPServer((plan["host"], plan["port"]), Handler).serve_forever()
"""


@pytest.fixture
def plan() -> Plan:
    return plan_file(SPEC, (f"engine.port={free_port()}", "engine.device=cpu"))


def engine(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(launch, "engine_command", lambda: [sys.executable, "-c", script])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def stub_pid(log: Path) -> int:
    return int(log.read_text().split()[1])


def test_a_block_has_a_server_that_answers_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    engine(monkeypatch, STUB)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for this machine's servers
    log = tmp_path / "log"
    with running_server(plan, log, env={"EXTRA": "more"}) as url:
        assert url == f"http://127.0.0.1:{plan.engine.port}"
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert is_alive(stub_pid(log))
        assert "more" in log.read_text()
    assert not is_alive(stub_pid(log))
    assert PLAN_VARIABLE not in os.environ, "the plan is the server's alone"


def test_the_server_ends_when_the_block_fails(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    engine(monkeypatch, STUB)
    with pytest.raises(KeyboardInterrupt), running_server(plan, tmp_path / "log"):
        raise KeyboardInterrupt
    assert not is_alive(stub_pid(tmp_path / "log"))


def test_a_server_that_ends_at_start_shows_the_tail_of_its_log(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    engine(monkeypatch, "for i in range(99): print('line', i)\nraise SystemExit(4)")
    with pytest.raises(ServerFailed) as error, running_server(plan, tmp_path / "log"):
        pytest.fail("it never answered")
    lines = str(error.value).splitlines()
    assert lines[0] == "the server ended with code 4"
    assert lines[1:] == [f"line {i}" for i in range(69, 99)]


def test_a_server_that_never_answers_is_given_up_and_ended(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    engine(monkeypatch, "import os, time; print('stub', os.getpid(), flush=True); time.sleep(60)")
    began = time.monotonic()
    with (
        pytest.raises(ServerFailed, match="not ready after 1 s"),
        running_server(plan, tmp_path / "log", timeout_seconds=1.0),
    ):
        pytest.fail("it never answered")
    assert time.monotonic() - began < 5
    assert not is_alive(stub_pid(tmp_path / "log"))


def test_no_server_outlives_a_killed_test_run(plan: Plan, tmp_path: Path) -> None:
    log = tmp_path / "log"
    runner = f"""
import os, signal
from pathlib import Path
from specstack.plan import Plan
from specstack_serving import launch
launch.engine_command = lambda: {[sys.executable, "-c", STUB]!r}
plan = Plan.model_validate_json({plan.model_dump_json()!r})
with launch.running_server(plan, Path({str(log)!r})):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run: Any = subprocess.run([sys.executable, "-c", runner], timeout=30, check=False)
    assert run.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while is_alive(stub_pid(log)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(stub_pid(log))
