"""Real trees of processes: none outlives its supervisor, whatever the moment of the signal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specstack_serving.supervisor import PARENT_VARIABLE, Supervisor

RUN = """
import sys
from specstack_serving import supervisor
supervisor.GRACE_SECONDS = float(sys.argv[1])
say = lambda text: print(text, file=sys.stderr, flush=True)
sys.exit(supervisor.Supervisor(sys.argv[2:], say).run())
"""
DIE = "from specstack_serving.supervisor import end_with_starter; end_with_starter(9); "
SLEEP = "import time; print('ready', flush=True); time.sleep(60)"
STUBBORN = 'trap "" TERM INT HUP; sleep 60 & sleep 60 & echo ready; while true; do wait; done'
"""A shell, and two grandchildren, that ignore polite signals."""

Start = Callable[..., subprocess.Popen[bytes]]


def alive(mark: str) -> list[int]:
    """Processes (zombies excluded) that carry `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = folder.joinpath("stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark.encode() in folder.joinpath("environ").read_bytes():
                found.append(int(folder.name))
        except (OSError, IndexError):
            continue
    return found


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def mark() -> Iterator[str]:
    """A word in the environment of all processes of a test; what is left of them is killed."""
    word = f"mark-{uuid.uuid4().hex}"
    yield word
    for pid in alive(word):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(mark: str) -> Start:
    """Start a supervisor in its own process, as a shell would start `specstack serve`."""

    def started(
        *command: str, grace: float = 20.0, before: Callable[[], object] | None = None
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(grace), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "MARK": mark},
            preexec_fn=before,
        )

    return started


def wait_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"


@pytest.mark.parametrize("code", [0, 7])
def test_the_childs_own_code_is_the_exit_code(start: Start, code: int) -> None:
    assert start("sh", "-c", f"exit {code}").wait(10) == code


def test_a_child_that_dies_by_a_signal_gives_128_plus_the_signal(start: Start) -> None:
    assert start("sh", "-c", "kill -KILL $$").wait(10) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_requested_stop_gives_128_plus_the_signal(
    start: Start, mark: str, number: signal.Signals, code: int
) -> None:
    process = start("sh", "-c", "sleep 60 & echo ready; wait")
    wait_ready(process)
    process.send_signal(number)
    assert process.wait(10) == code
    assert alive(mark) == []


def test_grandchildren_end_with_a_child_that_ends_by_itself(start: Start, mark: str) -> None:
    process = start("sh", "-c", 'trap "" TERM; sleep 60 & sleep 60 & exit 3')
    assert process.wait(10) == 3
    assert alive(mark) == []


def test_the_child_may_finish_its_work_after_the_first_signal(start: Start, tmp_path: Path) -> None:
    done = tmp_path / "done"
    work = f"trap 'kill $!; sleep 0.3; touch {done}; exit 0' TERM; sleep 60 & echo ready; wait"
    process = start("sh", "-c", work)
    wait_ready(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert done.exists()
    assert process.stderr is not None
    assert process.stderr.read() == b"stopping; once more stops at once\n"


def test_a_terminal_that_is_gone_does_not_cut_the_work_short(start: Start, tmp_path: Path) -> None:
    done = tmp_path / "done"
    work = f"trap 'kill $!; sleep 0.3; touch {done}; exit 0' TERM; sleep 60 & echo ready; wait"
    process = start("sh", "-c", work)
    wait_ready(process)
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(10) == 129
    assert done.exists()


def test_a_second_signal_stops_at_once(start: Start, mark: str) -> None:
    process = start("sh", "-c", STUBBORN)
    wait_ready(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None, "the child ignores the first one"
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(10) == 130
    assert time.monotonic() - began < 2.0
    assert alive(mark) == []


def test_a_stubborn_child_is_killed_when_its_time_is_up(start: Start, mark: str) -> None:
    process = start("sh", "-c", STUBBORN, grace=0.3)
    wait_ready(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    assert alive(mark) == []


@pytest.mark.parametrize("round_", range(3))
def test_nothing_survives_a_signal_at_any_moment(start: Start, mark: str, round_: int) -> None:
    rng = random.Random(round_)
    for _ in range(8):
        process = start("sh", "-c", STUBBORN, grace=0.1)
        time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.25)]))
        process.send_signal(rng.choice([signal.SIGINT, signal.SIGTERM]))
        # Python itself answers before the supervisor does: no child yet, other codes.
        assert process.wait(10) in (130, 143, 1, -signal.SIGINT, -signal.SIGTERM)
        assert alive(mark) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_around_the_start_of_the_child_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(*args: object, **kwargs: object) -> object:
        if moment == "before":
            os.kill(os.getpid(), signal.SIGINT)
        started.append(popen(*args, **kwargs))  # type: ignore[call-overload]
        if moment == "after":
            os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert Supervisor(["sleep", "60"], lambda text: None).run() == 130
    assert started[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_signal_before_the_start_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signal.signal
    sent: list[int] = []

    def install_and_send(number: int, handler: object) -> object:
        previous = install(number, handler)  # type: ignore[arg-type]
        if number == signal.SIGTERM and not sent:
            sent.append(number)
            os.kill(os.getpid(), signal.SIGTERM)
        return previous

    monkeypatch.setattr(signal, "signal", install_and_send)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    assert Supervisor(["sleep", "60"], lambda text: None).run() == 143


def test_a_command_that_cannot_start_leaves_the_callers_handlers() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(FileNotFoundError):
        Supervisor(["/no/such/command"], lambda text: None).run()
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before


def test_ctrl_c_of_the_terminal_reaches_the_child_as_one_polite_request(start: Start) -> None:
    """The terminal signals the whole foreground group; the engine is not in it."""
    record = "for s in INT HUP; do trap \"echo $s\" $s; done; trap 'echo TERM; exit 0' TERM; "
    process = start("sh", "-c", record + "echo ready; while true; do sleep 0.05; done")
    wait_ready(process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(10) == 130
    assert process.stdout is not None
    assert process.stdout.read() == b"TERM\n"


def test_nohup_is_honoured(start: Start) -> None:
    process = start(
        "sh", "-c", "sleep 60 & echo ready; wait",
        before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    wait_ready(process)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
@pytest.mark.parametrize("asks", [True, False])
def test_a_killed_supervisor_takes_a_child_with_it_that_asks_for_that(
    start: Start, mark: str, asks: bool
) -> None:
    process = start(sys.executable, "-c", (DIE if asks else "") + SLEEP)
    wait_ready(process)
    process.kill()
    process.wait(10)
    assert eventually(lambda: alive(mark) == [], 2.0 if asks else 0.5) is asks


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    child = subprocess.run(
        [sys.executable, "-c", DIE + SLEEP],
        env={**os.environ, PARENT_VARIABLE: str(os.getppid())},
        capture_output=True,
        text=True,
        timeout=10,
    )
    said = "the process that started this one ended meanwhile\n"
    assert (child.returncode, child.stderr) == (1, said)


def test_the_parent_may_be_the_first_process_of_a_container(mark: str) -> None:
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not make a process namespace")
    child = DIE + "import os, sys; sys.exit(7 if os.getppid() == 1 else 8)"
    command = [*namespace, sys.executable, "-c", RUN, "10", sys.executable, "-c", child]
    env = {**os.environ, "MARK": mark}
    assert subprocess.run(command, timeout=20, env=env, check=False).returncode == 7
