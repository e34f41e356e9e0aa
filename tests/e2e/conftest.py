"""Fixtures of the end-to-end tests; `harness` starts the servers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from harness import Serve, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    return partial(serving, tmp_path_factory.mktemp("servers") / "log")
