"""Starts servers of the end-to-end tests: the real SGLang on the CPU, one at a time.

Every server takes about half a minute to start, so tests share them by fixture scope; two
multi-threaded servers at once would slow each other several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from specstack.plan import Plan
from specstack.processes import free_port
from specstack_serving.launch import running_server
from specstack_serving.main import prepare

SPECS = Path(__file__).parents[2] / "dsl" / "specs"

SMALL = (
    "engine.max_running_requests=8",
    "engine.max_total_tokens=8192",
    "engine.args.random_seed=7",
)

Serve = Callable[..., AbstractContextManager[str]]


def plan_of(spec: str | Path, *overrides: str) -> Plan:
    return prepare(SPECS / spec, (f"engine.port={free_port()}", *SMALL, *overrides))


@contextmanager
def serving(
    log: Path, spec: str | Path, *overrides: str, env: dict[str, str] | None = None
) -> Iterator[str]:
    """A server of one gallery spec, or of a pipeline's path, its log in `log`."""
    with running_server(plan_of(spec, *overrides), log, env=env) as url:
        yield url
