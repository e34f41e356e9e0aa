"""Load tests against the real server: the shipped smoke scenario, run and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, SPECS, Serve

from specstack_loadtest.records import RequestRecord, read_records

SPEC = str(SPECS / "quickstart.yaml")
BUDGET = "budget={kind: fixed, draft_budget: 7}"
ONE_CORE = {"OMP_NUM_THREADS": "1"}
"""Of the server's: the client needs one, too."""


def load(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specstack", "load", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900,
        env={**os.environ, **ONE_CORE},
    )  # fmt: skip


def records_of(folder: Path, side: str) -> list[RequestRecord]:
    return list(read_records(folder / "raw" / side / "0" / "requests.jsonl"))


@pytest.fixture(scope="module")
def url(serve: Serve) -> Iterator[str]:
    with serve("quickstart.yaml", BUDGET, env=ONE_CORE) as address:
        yield address


@pytest.fixture(scope="module")
def ran(url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The scenario against a server that runs: its folder and summary."""
    folder = tmp_path_factory.mktemp("load") / "run"
    done = load("run", "smoke", "--url", url, "--repeats", "1", "--out", folder,
                "--format", "json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_a_server_is_its_own_baseline(ran: tuple[Path, Any]) -> None:
    folder, summary = ran
    assert (summary["sides"], summary["baseline"]) == (["plain", "server"], "plain")
    assert not [problem for problem in summary["problems"] if problem["fatal"]]
    plain, ours = (records_of(folder, side) for side in ("plain", "server"))
    assert (
        [r.identity for r in plain] == [r.identity for r in ours] == [(0, i, 0) for i in range(8)]
    )
    assert not any(r.num_correct_drafts for r in plain), "they opted out"
    assert sum(r.num_correct_drafts or 0 for r in ours) > 8


def test_tokens_of_chunks_add_up_to_the_servers_count(ran: tuple[Path, Any]) -> None:
    for side in ("plain", "server"):
        for record in records_of(ran[0], side):
            assert record.chunk_tokens[-1] == record.output_tokens
            assert record.num_rounds is not None
            assert record.num_correct_drafts is not None
            emitted = record.num_rounds + record.num_correct_drafts + 1  # and the prompt's own
            assert 0 <= emitted - record.output_tokens <= 7  # a path may go past the end


def test_greedy_answers_equal_plain_decodings(ran: tuple[Path, Any]) -> None:
    found = ran[1]["outputs"]["sides"]["server"]
    assert (found["pairs"], found["different"]) == (8, 0)


def test_a_report_follows_from_its_raw_data(ran: tuple[Path, Any]) -> None:
    folder, _ = ran
    assert (folder / "report.html").stat().st_size > 100_000
    assert load("report", folder, "--verify").returncode == 0
    path = folder / "raw" / "server" / "0" / "requests.jsonl"
    kept = path.read_text()
    path.write_text(kept.replace('"output_tokens":24', '"output_tokens":23', 1))
    done = load("report", folder, "--verify")
    path.write_text(kept)
    assert done.returncode == 1
    assert "raw/server/0/requests.jsonl" in done.stderr


def test_pipelines_are_served_in_turn(tmp_path: Path) -> None:
    small = [word for override in (*SMALL, BUDGET) for word in ("--set", override)]
    arguments = ("compare", "smoke", "--pipeline", f"seven={SPEC}", "--repeats", "1", *small)
    done = load(*arguments, "--out", tmp_path / "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["sides"] == ["plain", "seven"]
    assert [run["complete"] for run in summary["runs"]] == [True, True]
    assert summary["outputs"]["sides"]["seven"]["different"] == 0
    again = load(*arguments, "--out", tmp_path / "run")
    assert again.returncode == 0
    assert again.stderr.count("is there, not run again") == 2
