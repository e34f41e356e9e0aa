"""Dashboards and rules over the real server: what panels ask for is there, under traffic."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from harness import Serve
from prometheus_tools import (
    PanelQuery,
    number_of_rules,
    panel_queries,
    running_prometheus,
    substituted,
    unhealthy_rules,
    values,
)

from specstack_serving.dashboards.queries import RECORDED

MODEL = "smollm2-135m-instruct"
QUESTIONS = (
    "Write a Python class Stack with push, pop and peek.",
    "List ten animals, one per line.",
    "Explain what a hash table is.",
)


def talk(url: str, stop: threading.Event, number: int) -> None:
    """Ask one question after the other, streamed, until told to stop."""
    while not stop.is_set():
        body = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": 64,
            "stream": True,
            "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        number += 1


@pytest.fixture(scope="module")
def prometheus(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that watches a server under traffic, with an acting and a shadow policy."""
    stop = threading.Event()
    shadow = "budget.shadow={kind: fixed, draft_budget: 3}"
    with serve("quickstart.yaml", shadow) as url:
        threads = [threading.Thread(target=talk, args=(url, stop, n)) for n in range(2)]
        for thread in threads:
            thread.start()
        targets = {"server": urlsplit(url).netloc}
        try:
            with running_prometheus(tmp_path_factory.mktemp("prom"), targets, seconds=2) as watcher:
                _wait_for_rules(watcher)
                yield watcher
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def _wait_for_rules(url: str) -> None:
    deadline = time.monotonic() + 120
    while missing := [name for name in RECORDED if not values(url, name)]:
        assert time.monotonic() < deadline, f"nothing was recorded as {missing}"
        time.sleep(1)
    time.sleep(10)  # every window has several scrapes


def panels_without_data(url: str, queries: list[PanelQuery]) -> set[str]:
    """Panels none of whose queries returns anything; depths that a tree lacks are missing lines."""
    seen: dict[str, int] = {}
    for query in queries:
        found = values(url, substituted(query.expr, window="30s"))
        seen[query.panel] = seen.get(query.panel, 0) + len(found)
    return {panel for panel, number in seen.items() if not number}


def test_every_panel_shows_something_of_the_real_server(prometheus: str) -> None:
    assert panels_without_data(prometheus, panel_queries()) == set()


def test_a_panel_over_a_misspelt_metric_is_noticed(prometheus: str) -> None:
    """Control."""
    wrong = PanelQuery("wrong", "sum(rate(specstack_round_total[30s]))", (0, 1))
    assert panels_without_data(prometheus, [wrong]) == {"wrong"}


def test_values_lie_within_the_bounds_of_their_panels(prometheus: str) -> None:
    outside = [
        (query.panel, value, query.expr)
        for query in panel_queries()
        for value in values(prometheus, substituted(query.expr, window="30s"))
        if not query.bounds[0] <= value <= query.bounds[1]
    ]
    assert outside == []


def test_correct_drafts_are_the_same_by_depth_and_in_all(prometheus: str) -> None:
    names = (
        "emitted_tokens",
        *(f"spec_decode_num_accepted_tokens{part}" for part in ("", "_per_pos")),
    )
    emitted, correct, by_depth = (
        values(prometheus, f"sum(specstack_{name}_total)")[0] for name in names
    )
    assert by_depth == pytest.approx(correct, rel=0.05), "the server goes on between two queries"
    assert emitted > correct > 0


def test_prometheus_evaluates_every_rule_over_the_real_server(prometheus: str) -> None:
    assert unhealthy_rules(prometheus, number_of_rules()) == []
