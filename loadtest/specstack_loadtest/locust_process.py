"""Locust as a child: started with a scenario, stopped politely, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from specstack import processes

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
STOP_S = 15.0
"""How long it may take to end by itself: workers are asked one after the other."""
WAIT_FOR_WORKERS_S = 60
SHOWN_LINES = 15
PARENT_VARIABLE = "SPECSTACK_LOAD_PARENT_PID"
"""Tells Locust which process started it."""
SAME_WISH_S = 1.0
"""Terminals and service managers send more than one signal when something is to end."""


class LocustProcess:
    """One run of Locust, with its workers, in a process group of its own."""

    def __init__(self, options: Sequence[str], num_workers: int, log: Path) -> None:
        """`options` come after those that say how it runs."""
        self._command = (
            sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE),
            "--headless", "--only-summary", "--exit-code-on-error", "0",
            *(_distributed(num_workers) if num_workers > 1 else ()), *options,
        )  # fmt: skip
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._log.parent,  # where no configuration of Locust lies
                env={**child_environment(), PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; below 0: the signal that ended it."""
        assert self._process is not None
        if self._process.returncode is not None:
            return self._process.returncode
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def stop(self) -> None:
        """End it, with requests in flight; their records are kept."""
        assert self._process is not None
        if self._process.returncode is not None:
            return
        try:
            if self.exit_code is None:
                os.kill(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
            while self.exit_code is None and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            # before the leader is reaped, while its id cannot name another group
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_words(self) -> str:
        """The end of its log."""
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-SHOWN_LINES:])


def end_with_starter() -> None:
    """In a process of Locust that `LocustProcess` started, on Linux: be killed when the one above
    ends, however that comes; of another Locust, change nothing.

    The leader ends with the thread that started it, its workers, forked from it, with the leader.
    """
    starter, leader = os.environ.get(PARENT_VARIABLE), os.getsid(0)
    if starter is None or sys.platform != "linux":
        return
    parent = int(starter) if os.getpid() == leader else leader
    processes.die_with_parent(signal.SIGKILL, parent)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End a block on SIGTERM and SIGHUP as on Ctrl-C: by KeyboardInterrupt.

    Once more does it again, if not at once. A SIGHUP that is ignored stays so (nohup). Python
    handles signals in its main thread: in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last_s = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= SAME_WISH_S:
            last_s = now_s
            raise KeyboardInterrupt

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _distributed(num_workers: int) -> tuple[str, ...]:
    port = str(processes.free_port())
    return (
        "--processes", str(num_workers), "--expect-workers-max-wait", str(WAIT_FOR_WORKERS_S),
        "--master-bind-host", "127.0.0.1", "--master-bind-port", port,
        "--master-host", "127.0.0.1", "--master-port", port,
    )  # fmt: skip


def child_environment() -> dict[str, str]:
    """Ours, so that it finds what we import, without the settings of other runs of Locust."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LOCUST_")}
    inherited.pop("SPECSTACK_SCENARIO", None)
    return {**inherited, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
