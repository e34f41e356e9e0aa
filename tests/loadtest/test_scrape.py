"""What is kept of a server's metrics, when, and what it says of itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fake_server import METRICS, Script, running_server
from hypothesis import given
from hypothesis import strategies as st

from specstack_loadtest.runs import Scrape
from specstack_loadtest.scrape import Scraper, changes, kept_values, latest_gauge, server_facts
from specstack_loadtest.shares import Clock


def test_counters_and_gauges_of_servers_are_kept() -> None:
    values = kept_values(METRICS.format(tokens=12, requests=3))
    assert values == {
        'sglang:generation_tokens_total{model_name="fake"}': 12.0,
        'sglang:num_running_reqs{model_name="fake"}': 1.0,
        'specstack_draft_budget{model_name="fake"}': 4.0,
        'mine_rounds_total{draft_budget="4",reason="say \\"so\\""}': 3.0,
    }
    assert latest_gauge(values, "_draft_budget") == 4.0
    assert latest_gauge(values, "_nothing") is None


def test_what_is_no_page_of_metrics_is_said() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        kept_values("specstack_x nonsense")


def test_a_line_is_written_at_every_second_of_the_run(tmp_path: Path) -> None:
    path, clock = tmp_path / "metrics.jsonl", Clock(time.time() + 0.4)
    with running_server(Script(), tmp_path / "server") as server:
        scraper = Scraper(server.url, path, clock)
        scraper.start()
        time.sleep(2.6)
        scraper.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [round(line["t_s"]) for line in lines] == [0, 1, 2]
    assert all(abs(line["t_s"] - round(line["t_s"])) < 0.25 for line in lines)
    assert lines[0]["values"] == scraper.latest
    assert [line["values"] for line in lines[1:]] == [{}, {}], "nothing was asked of the server"


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), max_size=6))
def test_what_changed_gives_all_values_back(pages: list[dict[str, float]]) -> None:
    scrape, before = Scrape(0.0, {}), dict[str, float]()
    for second, page in enumerate(pages):
        scrape = scrape.after(second, changes(before, page))
        assert scrape == Scrape(second, page)
        before = page


def test_a_server_without_metrics_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with running_server(Script(has_metrics=False), tmp_path / "server") as server:
        scraper = Scraper(server.url, path, Clock(time.time() - 0.8))
        scraper.start()
        scraper.join(5.0)
        assert not scraper.is_alive()
    assert path.read_text() == ""


def kept_lines(
    folder: Path, faults: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, bool]:
    """How many lines there are after twelve questions, and whether more would be asked."""
    monkeypatch.setattr("specstack_loadtest.scrape.INTERVAL_S", 0.1)
    path = folder / "metrics.jsonl"
    with running_server(Script(page_faults=faults), folder / "server") as server:
        path.touch()
        scraper = Scraper(server.url, path, Clock(time.time()))
        scraper.start()
        deadline = time.monotonic() + 10.0
        while scraper.is_alive() and path.read_text().count("\n") < 12 - len(faults):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        goes_on = scraper.is_alive()
        scraper.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["values"] == {} for line in lines[1:]), "nothing was asked of the server"
    return len(lines), goes_on


@pytest.mark.parametrize("fault", ["http_500", "http_503", "bad_page"])
def test_pages_that_fail_leave_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    few = dict.fromkeys("2346789", fault)  # never five, one after the other
    num_lines, goes_on = kept_lines(tmp_path / "few", few, monkeypatch)
    assert goes_on
    assert num_lines >= 5
    assert kept_lines(tmp_path / "many", dict.fromkeys("23456", fault), monkeypatch) == (2, False)


def test_a_server_whose_metrics_are_gone_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_lines(tmp_path, {"2": "http_404"}, monkeypatch) == (2, False)


def test_facts_are_what_answers(tmp_path: Path) -> None:
    with running_server(Script(), tmp_path / "a") as server:
        facts = server_facts(server.url + "/v1")
    assert facts["version"] == "0.0"
    assert facts["effective_max_running_requests_per_dp"] == 16
    assert facts["specstack"] == {"plan_hash": "abc"}
    assert facts["max_total_num_tokens"] == 4096
    with running_server(Script(owned_by="vllm"), tmp_path / "b") as server:
        assert set(server_facts(server.url)) == {"url", "models"}
        gone = server.url
    assert server_facts(gone) == {"url": gone}
