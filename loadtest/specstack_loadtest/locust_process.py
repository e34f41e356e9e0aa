"""Locust as a child: started with a scenario, stopped politely, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
STOP_S = 15.0
"""How long it may take to end by itself: workers are asked one after the other."""
WAIT_FOR_WORKERS_S = 60
SHOWN_LINES = 15


class LocustProcess:
    """One run of Locust, with its workers, in a process group of its own."""

    def __init__(self, options: Sequence[str], num_workers: int, log: Path) -> None:
        """`options` come after those that say how it runs."""
        self.command = (
            sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE),
            "--headless", "--only-summary", "--exit-code-on-error", "0",
            *(_distributed(num_workers) if num_workers > 1 else ()), *options,
        )  # fmt: skip
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                cwd=self._log.parent,  # where no configuration of Locust lies
                env=child_environment(),
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


def _distributed(num_workers: int) -> tuple[str, ...]:
    port = str(_free_port())
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
