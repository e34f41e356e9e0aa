"""The engine process: `python -m specstack_serving.engine`, started by `specstack serve`.

Registers the plug-in before SGLang does, so that what goes wrong in it ends this process with a
traceback instead of one logged line and an unknown algorithm later.
"""

from __future__ import annotations

import signal
import sys

from specstack_serving import sglang_compat as sgl
from specstack_serving.admission import RequestOptions
from specstack_serving.carrier import current_plan
from specstack_serving.plugin import register
from specstack_serving.routes import Routes
from specstack_serving.server_args import server_argv
from specstack_serving.supervisor import end_with_starter


def main() -> None:
    """Serve the exported plan until told to stop."""
    end_with_starter(signal.SIGKILL)
    plan = current_plan()
    if plan is None:
        sys.exit("no plan: start the server with `specstack serve PIPELINE.yaml`")
    register()
    sgl.load_plugins()
    server_args = sgl.prepare_server_args(server_argv(plan))
    if plan.speculates:
        sgl.http_app.add_middleware(RequestOptions)
        Routes(plan).install()
    sgl.run_server(server_args)


if __name__ == "__main__":
    main()
