"""A server whose policy decides by costs measures them when it starts, once."""

from __future__ import annotations

from pathlib import Path

import httpx
from harness import Serve
from talk import QUESTIONS, Server


def test_a_server_that_needs_costs_measures_them_before_it_is_ready(serve: Serve) -> None:
    """No table is there: the cache is the tests' own."""
    with serve("goodput.yaml", "engine.max_running_requests=4") as url:
        status = httpx.get(f"{url}/specstack/status", timeout=60.0).json()
        assert status["costs"]["source"] == "measured"
        assert status["forced"] is None
        server = Server(url, Path())
        server.ask(QUESTIONS[0], 96)
        reasons = server.metrics()
        assert reasons["specstack_goodput_seconds_total"] > 0, "forecasts beside measurements"
    with serve("goodput.yaml", "engine.max_running_requests=4") as url:
        costs = httpx.get(f"{url}/specstack/status", timeout=60.0).json()["costs"]
        assert costs["source"] == "file", "the next start finds it"
        assert costs["key"] == status["costs"]["key"]
