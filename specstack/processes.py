"""For programs that start servers: a free port, and children that do not outlive them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent(number: signal.Signals, parent: int | None) -> None:
    """Linux: receive `number` when the thread that started this process ends.

    Exits at once when another process than `parent` is above by now; None: whoever is.
    """
    prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        sys.exit("the process that started this one ended meanwhile")


def prctl(option: int, value: int) -> None:
    """Ask the kernel for a trait of this process, on Linux; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
