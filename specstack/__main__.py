"""`specstack` and `python -m specstack`: Ctrl-C ends the command quietly, even during imports."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Import the command line with the system's own interrupt handling, then run it."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from specstack.cli import main

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
