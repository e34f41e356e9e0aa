"""The engine process: `python -m specstack_serving.engine`, started by `specstack serve`.

Registers the plug-in before SGLang does, so that what goes wrong in it ends this process with a
traceback instead of one logged line and an unknown algorithm later.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from specstack_serving import sglang_compat as sgl
from specstack_serving.admission import RequestOptions
from specstack_serving.carrier import current_plan
from specstack_serving.plugin import register
from specstack_serving.server_args import server_argv

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the exported plan until told to stop."""
    _die_with_parent()
    plan = current_plan()
    if plan is None:
        sys.exit("no plan: start the server with `specstack serve PIPELINE.yaml`")
    register()
    sgl.load_plugins()
    server_args = sgl.prepare_server_args(server_argv(plan))
    if plan.speculates:
        sgl.http_app.add_middleware(RequestOptions)
    sgl.run_server(server_args)


def _die_with_parent() -> None:
    """Linux: no engine outlives a `specstack serve` that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit("the parent ended during start")


if __name__ == "__main__":
    main()
