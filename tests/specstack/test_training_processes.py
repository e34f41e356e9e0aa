"""Regenerating answers while the process is killed or interrupted: nothing lost, nothing twice.

The server answers some prompts and holds the others back until the process has ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specstack.training.answers import read_answers
from specstack.training.testing import Reply, StubServer, completion, stub_server

LIMIT_S = 60
NUM, ANSWERED = 20, 7


@pytest.fixture
def server() -> Iterator[StubServer]:
    with stub_server() as stub:
        yield stub


@pytest.fixture
def command(tmp_path: Path, server: StubServer) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "text {i}"}}\n' for i in range(1, NUM + 1)))
    program = [sys.executable, "-m", "specstack", "draft", "regenerate"]
    options = ["--url", server.url, "--concurrency", "4"]
    return [*program, str(prompts), "-o", str(tmp_path / "answers.jsonl"), *options]


def stop_in_the_middle(
    command: list[str], server: StubServer, out: Path, sent: signal.Signals
) -> tuple[int, str]:
    """Send a signal once `ANSWERED` answers are written and four requests wait; code and stderr."""
    free, hold = threading.Semaphore(ANSWERED), threading.Event()

    def some(body: dict[str, Any]) -> Reply:
        if not free.acquire(blocking=False):
            hold.wait(LIMIT_S)
        return completion(body)

    server.behaviour = some
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + LIMIT_S
        while len(server.requests) < ANSWERED + 4 or out.read_bytes().count(b"\n") < ANSWERED:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(sent)
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.communicate()
        hold.set()
    server.behaviour = completion
    return process.returncode, err


@pytest.mark.parametrize("torn", [b"", b'{"line":9,"id":"9","prompt'])
def test_killed_and_started_again_every_prompt_has_one_answer(
    command: list[str], server: StubServer, tmp_path: Path, torn: bytes
) -> None:
    out = tmp_path / "answers.jsonl"
    assert stop_in_the_middle(command, server, out, signal.SIGKILL)[0] == -signal.SIGKILL
    first = out.read_bytes()
    assert first.count(b"\n") == ANSWERED
    out.write_bytes(first + torn)
    server.requests.clear()

    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert again.returncode == 0, again.stderr
    assert f"{ANSWERED} answered before" in again.stdout
    assert len(server.requests) == NUM - ANSWERED, "what was answered is not asked again"
    assert out.read_bytes().startswith(first)
    found = {answer.line: answer.messages[-1]["content"] for answer in read_answers(out)}
    assert found == {line: f"TEXT {line}" for line in range(1, NUM + 1)}


def test_an_interrupt_says_how_to_go_on(
    command: list[str], server: StubServer, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    code, err = stop_in_the_middle(command, server, out, signal.SIGINT)
    assert code == 130
    assert err == (
        f"interrupted: {ANSWERED} of {NUM} prompts are answered in {out};"
        " the same command goes on from there\n"
    )
    assert subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode == 0
    assert sorted(answer.line for answer in read_answers(out)) == list(range(1, NUM + 1))
