"""A server whose policy decides by costs measures them when it starts, once."""

from __future__ import annotations

from pathlib import Path

import httpx
from harness import Serve
from talk import QUESTIONS, Server


def test_a_server_that_needs_costs_measures_them_before_it_is_ready(
    serve: Serve, tmp_path: Path
) -> None:
    """No table is there: the engine's cache is this test's own."""
    own = {"SPECSTACK_CACHE": str(tmp_path)}
    with serve("quickstart.yaml", "engine.max_running_requests=4", env=own) as url:
        status = httpx.get(f"{url}/specstack/status", timeout=60.0).json()
        assert status["costs"]["source"] == "measured"
        assert status["forced"] is None
        server = Server(url, Path())
        server.ask(QUESTIONS[0], 96)
        assert server.metrics()["specstack_goodput_seconds_total"] > 0, "there are forecasts"
    assert len(list(tmp_path.glob("costs/*.json"))) == 1
    with serve("quickstart.yaml", "engine.max_running_requests=4", env=own) as url:
        costs = httpx.get(f"{url}/specstack/status", timeout=60.0).json()["costs"]
        assert costs["source"] == "file", "the next start finds it"
        assert costs["key"] == status["costs"]["key"]
