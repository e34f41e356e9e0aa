"""Counters of the rounds, in a process that writes for several as SGLang's scheduler does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specstack.metrics.definitions import METRICS
from specstack.metrics.record import RoundRecord
from specstack.plan import MetricsPlan
from specstack_serving.exporter import RoundExporter

SETUP = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from specstack.metrics.record import RoundRecord
from specstack.plan import MetricsPlan
from specstack_serving.exporter import RoundExporter

def record(nodes=(), num_drafting=0, num_requests=2, num_opted_out=0, reason="fixed", **times):
    times = {f"{p}_seconds": times.get(p, 0.001) for p in ("draft", "build", "verify", "accept")}
    return RoundRecord(num_requests=num_requests, num_opted_out=num_opted_out,
                       num_drafting=num_drafting, draft_budget=4, reason=reason,
                       num_draft_tokens=5, nodes_per_depth=nodes, **times)

def exporter(per_position=True, prefix="specstack"):
    plan = MetricsPlan(prefix=prefix, per_position=per_position)
    return RoundExporter(plan, "m", enabled=True)

def scrape():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def scraped(tmp_path: Path, script: str, processes: int = 1) -> dict[str, float]:
    """Run `script` in its own processes, then read what a scrape of them all returns."""
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for text in [script] * processes + ["scrape()"]:
        command = [sys.executable, "-c", SETUP + text]
        output = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    samples = re.findall(r"^([^#\s]+) (\S+)$", output.stdout, re.MULTILINE)
    return {
        re.sub(
            r"\{model_name=\"m\"\}|model_name=\"m\",|,(pid|model_name)=\"\w+\"", "", name
        ): float(value)
        for name, value in samples
    }


MIXED = """
e = exporter()
e.round(record((4, 2, 2), num_drafting=2, num_opted_out=1, verify=0.5))
e.round(record(reason="batch>16"))
e.verified([3, 1])
e.round(record((1,), num_drafting=1))
e.verified([0, 0])
e.verified([0, 1])
"""


def test_counters_of_interleaved_rounds_sum(tmp_path: Path) -> None:
    """A round without drafts keeps its place: its zeros are not the next round's."""
    got = scraped(tmp_path, MIXED)
    assert got['specstack_rounds_total{reason="fixed"}'] == 2
    assert got['specstack_rounds_total{reason="batch>16"}'] == 1
    assert got["specstack_emitted_tokens_total"] == 5 + 6
    assert got["specstack_opted_out_requests_total"] == 1
    assert got["specstack_spec_decode_num_drafts_total"] == 2 + 1
    assert got["specstack_spec_decode_num_draft_tokens_total"] == 8 + 1
    assert got["specstack_spec_decode_num_accepted_tokens_total"] == 4 + 1
    assert got["specstack_verify_seconds_count"] == 3


def test_accept_counts_belong_to_the_oldest_round(tmp_path: Path) -> None:
    script = """
e = exporter()
e.round(record((4, 2, 2), num_drafting=2))
e.round(record(reason="batch>16"))
e.verified([3, 1])
"""
    assert scraped(tmp_path, script)["specstack_spec_decode_num_drafts_total"] == 2


def test_counts_per_position_add_up_and_never_exceed_what_was_proposed(tmp_path: Path) -> None:
    got = scraped(tmp_path, MIXED)
    proposed = "specstack_spec_decode_num_draft_tokens_per_pos_total"
    correct = "specstack_spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [
        [got.get(f'{name}{{position="{p}"}}', 0.0) for p in range(4)]
        for name in (proposed, correct)
    ]
    assert by_position == [[5, 2, 2, 0], [3, 1, 1, 0]]
    assert all(c <= p for p, c in zip(*by_position, strict=True))
    assert sum(by_position[0]) == got["specstack_spec_decode_num_draft_tokens_total"]
    assert sum(by_position[1]) == got["specstack_spec_decode_num_accepted_tokens_total"]


def test_a_merge_counts_its_drafters(tmp_path: Path) -> None:
    script = """
from dataclasses import replace
plan = MetricsPlan(prefix="specstack", per_position=True)
e = RoundExporter(plan, "m", enabled=True, drafters=("block", "ngram"))
e.round(replace(record((4,)), drafts_per_drafter=(3, 2, 0), correct_per_drafter=(1, 0, 0)))
e.round(record((1,)))
"""
    got = scraped(tmp_path, script)
    drafts = "specstack_spec_decode_num_draft_tokens_per_drafter_total"
    correct = "specstack_spec_decode_num_accepted_tokens_per_drafter_total"
    assert got[f'{drafts}{{drafter="block"}}'] == 3
    assert got[f'{drafts}{{drafter="ngram"}}'] == 2
    assert got[f'{correct}{{drafter="block"}}'] == 1
    assert f'{correct}{{drafter="ngram"}}' not in got


def test_without_per_position_there_are_no_such_series(tmp_path: Path) -> None:
    got = scraped(tmp_path, MIXED.replace("exporter()", "exporter(per_position=False)"))
    assert not any("position=" in name for name in got)
    assert got["specstack_spec_decode_num_accepted_tokens_total"] == 5


def test_several_processes_are_summed(tmp_path: Path) -> None:
    got = scraped(tmp_path, MIXED, processes=2)
    assert got["specstack_emitted_tokens_total"] == 22
    assert got["specstack_verify_seconds_count"] == 6
    assert got["specstack_draft_budget"] == 4
    assert got["specstack_num_draft_tokens"] == 5


def test_counters_start_at_zero_rather_than_missing(tmp_path: Path) -> None:
    """A rate over a series that does not exist is empty, not zero."""
    got = scraped(tmp_path, "exporter()")
    counters = [m.name for m in METRICS if m.kind == "counter" and not m.labels]
    assert {f"specstack_{name}_total": 0.0 for name in counters}.items() <= got.items()


def test_two_workers_of_one_process_share_the_metrics_and_not_the_queue(tmp_path: Path) -> None:
    script = """
one, two = exporter(), exporter()
one.round(record((1,), num_drafting=1))
two.round(record())
two.verified([0, 0])
one.verified([1, 0])
"""
    got = scraped(tmp_path, script)
    assert got['specstack_rounds_total{reason="fixed"}'] == 2
    assert got["specstack_emitted_tokens_total"] == 5
    assert got["specstack_spec_decode_num_drafts_total"] == 1


@pytest.mark.parametrize("prefix", ["specstack", "a", "Team_1", "x" * 40])
def test_every_prefix_that_the_language_admits_makes_valid_names(
    tmp_path: Path, prefix: str
) -> None:
    got = scraped(tmp_path, f"exporter(prefix={prefix!r})")
    assert f"{prefix}_emitted_tokens_total" in got
    name = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
    assert all(name.fullmatch(f"{prefix}_{metric.name}") for metric in METRICS)


def test_a_disabled_exporter_counts_and_keeps_nothing() -> None:
    exporter = RoundExporter(MetricsPlan(prefix="p", per_position=True), "m", enabled=False)
    record = RoundRecord(1, 0, 1, 4, "fixed", 5, (1,), 0.0, 0.0, 0.0, 0.0)
    for _ in range(3):
        exporter.round(record)
    assert not exporter._awaiting
    exporter.verified([0])


def test_names_are_unique_and_documented() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(metric.help.endswith(".") for metric in METRICS)
