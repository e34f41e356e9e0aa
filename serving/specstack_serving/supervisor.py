"""Runs the engine as a child in a process group of its own and leaves nothing behind.

SGLang is a tree of processes; a signal at the wrong moment of its start orphans some of them.
Here the whole group ends together, whatever the moment: politely first, then for good.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

from specstack.processes import die_with_parent, prctl

GRACE_SECONDS = 10.0
"""How long running requests may take to finish after the first signal."""
PARENT_VARIABLE = "SPECSTACK_PARENT_PID"
"""Tells a process who started it, so that it notices a parent that is gone already."""
_REAP_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """Starts one command and forwards the wish to stop."""

    def __init__(self, command: list[str], say: Callable[[str], None]) -> None:
        self._command = command
        self._say = say
        self._received: signal.Signals | None = None
        self._deadline: float | None = None

    def run(self) -> int:
        """Run to the end; returns the exit code that the caller should use.

        That is 128 + the signal for a requested stop, else the command's own code.
        """
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: goes on without a terminal
            wanted.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self._on_signal) for number in wanted}
        code = 0
        try:
            if self._received is None:
                code = self._run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._received is not None:
            return 128 + self._received
        return code if code >= 0 else 128 - code

    def _run(self) -> int:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the child become ours to reap
        process = subprocess.Popen(
            self._command,
            start_new_session=True,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )
        try:
            self._wait(process.pid)
        finally:
            # Before the leader is reaped, while its id cannot name another group.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            _wait_for_group(process.pid)
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return code

    def _wait(self, pid: int) -> None:
        """Return when the command has ended (not reaped) or its time is up."""
        asked = False
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if self._received is not None and not asked:
                asked = True
                os.kill(pid, signal.SIGTERM)
                with contextlib.suppress(OSError):  # the terminal may be gone
                    self._say("stopping; once more stops at once")
            if self._deadline is not None and time.monotonic() > self._deadline:
                return
            time.sleep(0.05)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self._received is not None
        self._received = signal.Signals(number)
        self._deadline = time.monotonic() + (0.0 if again else GRACE_SECONDS)


def engine_command() -> list[str]:
    """The engine process of this Python."""
    return [sys.executable, "-m", "specstack_serving.engine"]


def end_with_starter(number: signal.Signals) -> None:
    """Linux: receive `number` when the thread that started this process ends.

    Exits at once when the process that PARENT_VARIABLE names is gone already. The parent may well
    be process 1: that of a container.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    die_with_parent(number, None if parent is None else int(parent))


def _wait_for_group(pid: int) -> None:
    """Wait until killed processes are gone: their ports and memory are free then."""
    deadline = time.monotonic() + _REAP_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-pid, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)
