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

GRACE_SECONDS = 10.0
"""How long running requests may take to finish after the first signal."""


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
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, self._on_signal) for number in wanted}
        process = subprocess.Popen(self._command, start_new_session=True)
        try:
            code = self._wait(process)
        finally:
            _kill_group(process.pid)
            process.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._received is not None:
            return 128 + self._received
        return code if code >= 0 else 128 - code

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        asked = False
        while (code := process.poll()) is None:
            if self._received is not None and not asked:
                asked = True
                self._say("stopping; once more stops at once")
                process.send_signal(signal.SIGTERM)
            if self._deadline is not None and time.monotonic() > self._deadline:
                return 0
            time.sleep(0.05)
        return code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self._received is not None
        self._received = signal.Signals(number)
        self._deadline = time.monotonic() + (0.0 if again else GRACE_SECONDS)


def engine_command() -> list[str]:
    """The engine process of this Python."""
    return [sys.executable, "-m", "specstack_serving.engine"]


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
