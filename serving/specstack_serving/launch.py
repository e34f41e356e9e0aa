"""A server for the length of a block: for the lossless check, benchmarks and tests."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import httpx

from specstack.plan import Plan
from specstack.processes import free_port
from specstack_serving.address import base_url
from specstack_serving.carrier import PLAN_VARIABLE
from specstack_serving.main import prepare
from specstack_serving.supervisor import PARENT_VARIABLE, engine_command

READY_SECONDS = 900.0
"""For a server to load its weights and, where its policy needs one, measure a cost table."""

_SUPERVISE = """
import signal, sys
from specstack_serving.supervisor import Supervisor, end_with_starter
end_with_starter(signal.SIGTERM)
sys.exit(Supervisor(sys.argv[1:], lambda text: None).run())
"""


class ServerFailed(RuntimeError):
    """The server ended, or did not become ready; the text ends with the tail of its log."""


@contextmanager
def running_server(
    plan: Plan,
    log: Path,
    *,
    timeout_seconds: float = READY_SECONDS,
    env: dict[str, str] | None = None,
) -> Iterator[str]:
    """Serve `plan`, yield the base URL once it answers, and end every process of it.

    Raises:
        ServerFailed: it ended or was not ready in time.
    """
    environment = {
        **os.environ,
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
        **(env or {}),
        PLAN_VARIABLE: plan.model_dump_json(),
        PARENT_VARIABLE: str(os.getpid()),
    }
    url = base_url(plan.engine.host, plan.engine.port)
    python, *rest = engine_command()
    command = [python, "-c", _SUPERVISE, python, *rest]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait_until_ready(process, url, log, timeout_seconds)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextmanager
def pipeline_server(
    pipeline: Path, overrides: tuple[str, ...], *, log: Path | None = None
) -> Iterator[str]:
    """Serve a pipeline file for the length of a block; for the commands of other packages.

    It listens on this machine alone, on a free port, unless `overrides` say where.

    Args:
        log: where the server's own words go; None: a file that is gone after the block.

    Raises:
        SpecError, PlanError, ModelError, ClickException: it cannot be served.
    """
    own = ("engine.host=127.0.0.1", f"engine.port={free_port()}")
    plan = prepare(pipeline, (*own, *overrides))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        log = log or Path(folder, "server.log")
        try:
            url = stack.enter_context(running_server(plan, log))
        except ServerFailed as error:
            raise click.ClickException(str(error)) from None
        yield url


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout_seconds: float
) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with code {process.returncode}\n{_tail(log)}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise ServerFailed(f"not ready after {timeout_seconds:.0f} s\n{_tail(log)}")


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
