"""Fixtures of the end-to-end tests; `harness` starts the servers, one at a time.

The plain server's answers are recorded once and compared with every speculative server.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import answers, continuations
from harness import Serve, serving

from specstack.applications import PLAIN_OVERRIDES
from specstack.models.packaged import cache_folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session", autouse=True)
def own_cost_tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured beside other tests must not stay: a cache of our own, but for the models."""
    own, kept = tmp_path_factory.mktemp("cache"), cache_folder()
    (kept / "models").mkdir(parents=True, exist_ok=True)
    for entry in kept.iterdir():
        if entry.name != "costs":
            (own / entry.name).symlink_to(entry)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SPECSTACK_CACHE", str(own))
        yield


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    return partial(serving, tmp_path_factory.mktemp("servers") / "log")


@pytest.fixture(scope="session")
def plain(serve: Serve) -> dict[str, Any]:
    """Plain decoding of every greedy case ("answers") and of the prompt set ("continuations").

    It schedules synchronously: with overlap, the engine counts penalties a token late.
    """
    with serve(
        "quickstart.yaml", *PLAIN_OVERRIDES, "engine.args.disable_overlap_schedule=true"
    ) as url:
        return {"answers": answers(url), "continuations": continuations(url, concurrency=8)}
