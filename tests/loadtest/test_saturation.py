"""Whether a client that cannot keep up is found out, and one that can is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_server import Script, running_server
from small_scenarios import records_of, write_scenario

from specstack_loadtest.locust_process import child_environment
from specstack_loadtest.records import RequestRecord
from specstack_loadtest.runner import run_once
from specstack_loadtest.saturation import Saturation, verdict

PROGRAM = """
from gevent import monkey; monkey.patch_all()
import sys, time, gevent
from specstack_loadtest.saturation import sample_client

def hog():
    while True:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        gevent.sleep(0.02)

sampler = gevent.spawn(sample_client, open(sys.argv[1], "w"), 3, time.monotonic, lambda: 5)
if sys.argv[2] == "hog":
    gevent.spawn(hog)
gevent.sleep(4)
"""


def sampled(path: Path, kind: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", PROGRAM, str(path), kind]
    subprocess.run(command, check=True, timeout=60, env=child_environment())
    return [json.loads(line) for line in path.read_text().splitlines()]


HOG = """
import time
import gevent
from specstack_loadtest.locustfile import *

def hog():
    while True:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            pass
        gevent.sleep(0.05)

gevent.spawn(hog)
"""


@pytest.mark.timing
def test_a_run_with_a_busy_client_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the files that it leaves."""
    (tmp_path / "hog.py").write_text(HOG)
    monkeypatch.setattr("specstack_loadtest.locust_process.LOCUSTFILE", tmp_path / "hog.py")
    scenario = write_scenario(tmp_path, {"kind": "poisson", "rate": 8.0}, {"seconds": 3})
    with running_server(Script(), tmp_path / "server") as server:
        run_once(scenario, server.url, tmp_path / "run")
    lines = (tmp_path / "run" / "client.jsonl").read_text().splitlines()
    found = verdict([json.loads(line) for line in lines], records_of(tmp_path / "run"))
    assert found.saturated
    assert found.lag_p99_s is not None
    assert found.lag_p99_s > 0.15
    assert found.late_p99_s is not None
    assert found.late_p99_s > 0.1


def record(due_s: float, sent_s: float) -> RequestRecord:
    return RequestRecord(
        phase=0, index=0, turn=0, worker=0, warmup=False, due_s=due_s, sent_s=sent_s,
        chunk_s=(), chunk_tokens=(), end_s=sent_s, error=None, detail="", finish_reason=None,
        prompt_tokens=None, cached_tokens=None, output_tokens=None, max_tokens=1,
        temperature=0.0, text_sha256="", num_correct_drafts=None, num_proposed_drafts=None,
        num_rounds=None, correct_drafts_histogram=(),
    )  # fmt: skip


def judged(lag_s: float = 0.001, cpu: float = 0.2, late_s: float = 0.001) -> Saturation:
    samples = [{"t_s": float(n), "worker": 0, "lag_s": lag_s, "cpu": cpu} for n in range(50)]
    return verdict(samples, [record(float(n), n + late_s) for n in range(50)])


@pytest.fixture(scope="module")
def hogged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return sampled(tmp_path_factory.mktemp("hog") / "client.jsonl", "hog")


def test_a_busy_client_is_found(hogged: list[dict[str, Any]]) -> None:
    found = verdict(hogged, [])
    assert found.saturated
    assert found.lag_p99_s is not None
    assert found.lag_p99_s > 0.2
    assert "more --workers" in found.sentence


def test_an_idle_client_is_not(tmp_path: Path, hogged: list[dict[str, Any]]) -> None:
    """Its own time is free whatever else runs; its sleeps are much shorter than the busy one's."""
    samples = sampled(tmp_path / "client.jsonl", "idle")
    assert 3 <= len(samples) <= 4
    assert set(samples[0]) == {"t_s", "worker", "lag_s", "cpu", "in_flight"}
    assert samples[0]["worker"] == 3
    assert samples[0]["in_flight"] == 5
    assert max(sample["cpu"] for sample in samples) < 0.3
    assert min(sample["lag_s"] for sample in samples) < 0.05
    assert not verdict(samples[-1:], []).busy_share


def test_what_is_within_bounds_is_fine() -> None:
    found = judged()
    assert not found.saturated
    assert found.sentence == "The client kept up."
    assert judged(lag_s=0.099, cpu=0.89, late_s=0.099) == Saturation(
        False, pytest.approx(0.099), pytest.approx(0.099), 0.0, "The client kept up."
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lag_s": 0.15}, "its sleeps took up to 150 ms too long"),
        ({"late_s": 0.2}, "requests were sent up to 200 ms late"),
        ({"cpu": 0.95}, "its CPU was full for 100% of the time"),
    ],
)
def test_each_sign_is_enough(changes: dict[str, float], words: str) -> None:
    found = judged(**changes)
    assert found.saturated
    assert words in found.sentence


def test_a_tenth_of_the_samples_may_be_busy() -> None:
    samples = [{"t_s": 0.0, "worker": 0, "lag_s": 0.0, "cpu": float(n < 5)} for n in range(50)]
    assert not verdict(samples, []).saturated
    assert verdict([*samples, {**samples[0]}], []).saturated


def test_nothing_sampled_is_said() -> None:
    found = verdict([], [])
    assert not found.saturated
    assert "no samples" in found.sentence


def test_a_hiccup_of_a_short_run_is_no_saturation() -> None:
    samples = [
        {"t_s": float(n), "worker": 0, "lag_s": 0.3 * (n < 2), "cpu": 0.2} for n in range(20)
    ]
    assert not verdict(samples, []).saturated
    assert verdict([*samples, samples[0]], []).saturated, "three are no accident"
