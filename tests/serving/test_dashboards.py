"""The dashboards: committed as generated, and every query answered by a real Prometheus.

A fake exporter offers every family of `definitions` (and what is read of SGLang's) with rising
values as `busy`, and the same families at rest as `idle`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_tools import (
    DASHBOARDS,
    ROOT,
    PanelQuery,
    number_of_rules,
    panel_queries,
    running_prometheus,
    substituted,
    unhealthy_rules,
    values,
    without_zero,
)

from specstack.metrics.definitions import CONTEXT_BUCKETS, GOODPUT_SIDES, METRICS, Metric
from specstack_serving.dashboards import queries
from specstack_serving.dashboards.__main__ import main
from specstack_serving.dashboards.acceptance import MAX_DEPTH
from specstack_serving.dashboards.boards import BOARDS
from specstack_serving.dashboards.panels import Board, Panel
from specstack_serving.dashboards.queries import PREFIX, SGLANG_METRICS, UnknownName

LABEL_VALUES: dict[str, tuple[str, ...]] = {
    "draft_budget": ("0", "7"),
    "reason": ("goodput", "off"),
    "position": tuple(str(position) for position in range(MAX_DEPTH)),
    "context": CONTEXT_BUCKETS,
    "drafter": ("block", "ngram"),
    "side": GOODPUT_SIDES,
    "source": (queries.CACHED, "computed"),
    "status_code": ("200", "404", "500"),
}
EACH_TICK = {
    "rounds": 10, "emitted_tokens": 90, "spec_decode_num_drafts": 30,
    "spec_decode_num_draft_tokens": 200, "spec_decode_num_accepted_tokens": 60,
    "wasted_drafts": 140, "off_seconds": 0.05,
    "spec_decode_num_draft_tokens_per_pos": 20, "spec_decode_num_accepted_tokens_per_pos": 4,
    "spec_decode_num_draft_tokens_per_context": 20, "spec_decode_num_drafts_per_context": 5,
    "spec_decode_num_draft_tokens_per_drafter": 20,
}  # fmt: skip
"""Of counters, per series; 1 where nothing is said. Such that every share lies in [0, 1]."""
AT_REST = {"cost_table_drift": 0.3, "kv_usage": 0.5}
"""Of gauges; 1 where nothing is said."""
SECONDS = {"step_seconds": 0.2, "decision_seconds": 0.00002}
"""What each tick observes twice in a histogram; 0.02 where nothing is said."""


class FakeExporter:
    """Every family, with every bounded value of its labels."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ticks: list[Callable[[], Any]] = []
        for metric in METRICS:
            self._add(f"{PREFIX}_{metric.name}", metric)
        for metric in SGLANG_METRICS:
            self._add(metric.name, metric)

    def _add(self, name: str, metric: Metric) -> None:
        labels = ("model_name", *metric.labels)
        common: dict[str, Any] = {"registry": self.registry}
        family: Any
        if metric.kind == "counter":
            family = Counter(name, metric.help, labels, **common)
        elif metric.kind == "gauge":
            family = Gauge(name, metric.help, labels, **common)
        else:
            family = Histogram(name, metric.help, labels, buckets=metric.buckets, **common)
        for combination in _combinations(metric.labels):
            self._series(metric, family.labels("m", *combination))

    def _series(self, metric: Metric, series: Any) -> None:
        if metric.kind == "gauge":
            series.set(AT_REST.get(metric.name, 1))
        elif metric.kind == "counter":
            self._ticks.append(lambda: series.inc(EACH_TICK.get(metric.name, 1)))
        else:
            self._ticks.append(lambda: series.observe(SECONDS.get(metric.name, 0.02)))

    def tick(self) -> None:
        for rise in self._ticks:
            rise()


def _combinations(labels: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for label in labels:
        found = [(*one, value) for one in found for value in LABEL_VALUES.get(label, ("x",))]
    return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prometheus that has watched a busy and an idle server for a few seconds."""
    exporters = {"busy": FakeExporter(), "idle": FakeExporter()}
    servers = {
        name: start_http_server(0, "127.0.0.1", exporter.registry)
        for name, exporter in exporters.items()
    }
    stop = threading.Event()

    def rise() -> None:
        while not stop.wait(0.2):
            exporters["busy"].tick()

    thread = threading.Thread(target=rise)
    thread.start()
    addresses = {name: f"127.0.0.1:{server.server_port}" for name, (server, _) in servers.items()}
    try:
        with running_prometheus(tmp_path_factory.mktemp("prometheus"), addresses) as url:
            _wait_for_rules(url)
            yield url
    finally:
        stop.set()
        thread.join()
        for server, _ in servers.values():
            server.shutdown()
            server.server_close()


def _wait_for_rules(url: str) -> None:
    """Until recording rules have seen enough scrapes, and a pending alert has been written."""
    deadline = time.monotonic() + 60
    needed = [f'{name}{{instance="busy"}}' for name in queries.RECORDED] + ["ALERTS"]
    while not all(values(url, expr) for expr in needed):
        assert time.monotonic() < deadline, f"no data for {needed}"
        time.sleep(0.5)


def faults(url: str, query: PanelQuery, instance: str) -> list[str]:
    """What is wrong with the answer of one panel's query."""
    found = values(url, without_zero(substituted(query.expr, instance)))
    if not found:
        return [f"{query.panel}: no data: {query.expr}"]
    low, high = query.bounds
    return [
        f"{query.panel}: {value} is not within [{low}, {high}]: {query.expr}"
        for value in found
        if not low <= value <= high
    ]


def test_every_query_of_every_panel_returns_data_within_the_panels_bounds(prometheus: str) -> None:
    assert [fault for query in panel_queries() for fault in faults(prometheus, query, "busy")] == []


DOCUMENTED = re.findall(
    r"^\| [^|`]+ \| `([^`]+)` \|$", (ROOT / "docs/monitoring.md").read_text(), re.MULTILINE
)


def test_queries_of_the_documentation_return_data(prometheus: str) -> None:
    assert len(DOCUMENTED) >= 6
    assert [expr for expr in DOCUMENTED if not values(prometheus, expr)] == []


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("sum(rate(specstack_round_total[10s]))", "no data"),
        ('sum(rate(specstack_rounds_total{reasn="off"}[10s])) or vector(0)', "no data"),
        (
            "sum(rate(specstack_spec_decode_num_draft_tokens_total[10s]))"
            " / sum(rate(specstack_spec_decode_num_accepted_tokens_total[10s]))",
            "not within [0, 1]",
        ),
        ("sum(rate(specstack_rounds_total[10s])) * 0 / 0", "not within [0, 1]"),
    ],
)
def test_a_wrong_query_is_noticed(prometheus: str, expr: str, fault: str) -> None:
    """Control: a misspelt metric, a misspelt label, a ratio upside down, no number."""
    (found,) = faults(prometheus, PanelQuery("x", expr, (0, 1)), "busy")
    assert fault in found


def test_an_idle_server_gives_gaps_and_no_junk(prometheus: str) -> None:
    junk = {
        f"{query.panel}: {query.expr}"
        for query in panel_queries()
        for value in values(prometheus, substituted(query.expr, "idle"))
        if not math.isfinite(value)
    }
    assert junk == set()


def test_a_division_by_zero_is_noticed(prometheus: str) -> None:
    """Control."""
    idle = 'rate(specstack_emitted_tokens_total{instance="idle"}[10s])'
    assert [math.isfinite(value) for value in values(prometheus, f"{idle} / {idle}")] == [False]


def test_prometheus_evaluates_every_rule(prometheus: str) -> None:
    assert unhealthy_rules(prometheus, number_of_rules()) == []


def test_a_missing_rule_is_noticed(prometheus: str) -> None:
    """Control."""
    number = number_of_rules()
    expected = [f"{number} rules, expected {number + 1}"]
    assert unhealthy_rules(prometheus, number + 1) == expected


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path / "none")])
    assert (result.exit_code, "does not exist" in result.output) == (2, True)


def test_what_is_committed_is_what_is_generated(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    generated, committed = (
        {file.name: file.read_text() for file in folder.glob("*.json")}
        for folder in (tmp_path, DASHBOARDS)
    )
    assert generated == committed, "python -m specstack_serving.dashboards writes them"


PANELS = [(board, panel) for board in BOARDS for row in board.rows for panel in row.panels]


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=lambda part: part.title)
def test_a_panel_says_how_to_read_it(board: Board, panel: Panel) -> None:
    assert panel.unit
    assert panel.description.endswith((".", ")"))
    assert 0 < len(panel.queries) <= 26, "queries are named by letters"
    legends = [query.legend for query in panel.queries]
    assert len(set(legends)) == len(legends)
    assert all(legends) or panel.form == "table"


def test_rows_are_filled_and_titles_are_told_apart() -> None:
    for board in BOARDS:
        titles = [panel.title for row in board.rows for panel in row.panels]
        assert len(set(titles)) == len(titles)
        for row in board.rows:
            assert sum(panel.width for panel in row.panels) % 24 == 0, (board.uid, row.title)


@pytest.mark.parametrize("file", sorted(DASHBOARDS.glob("*.json")), ids=lambda file: file.stem)
def test_a_dashboard_can_be_imported_anywhere(file: Path) -> None:
    board = json.loads(file.read_text())
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "model_name", "instance"]
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    assert all(target["datasource"] == source for target in targets)
    assert all(source == panel["datasource"] for panel in board["panels"] if "targets" in panel)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: queries.rate("emited_tokens"), "did you mean emitted_tokens?"),
        (lambda: queries.rate("rounds", by=("raeson",)), "rounds has no label 'raeson'"),
        (lambda: queries.rate("rounds", cause="off"), "rounds has no label 'cause'"),
        (lambda: queries.rate("draft_budget"), "draft_budget is a gauge"),
        (lambda: queries.rate("step_seconds"), "step_seconds is a histogram"),
        (lambda: queries.gauge("rounds"), "rounds is a counter, not a gauge"),
        (lambda: queries.recorded("instance:x"), "no recording rule is named 'instance:x'"),
    ],
)
def test_a_name_that_nothing_exports_breaks_the_build(
    call: Callable[[], str], message: str
) -> None:
    with pytest.raises(UnknownName, match=message.replace("?", r"\?")):
        call()


def sglang_sources() -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (root,) = spec.submodule_search_locations
    files = Path(root, "srt/observability").glob("*.py")
    return "\n".join(file.read_text() for file in files)


def test_metrics_of_sglang_are_there() -> None:
    sources = sglang_sources()
    for metric in SGLANG_METRICS:
        assert f'name="{metric.exported_name}"' in sources
    assert 'name="sglang:no_such_metric"' not in sources  # control
