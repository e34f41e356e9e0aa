"""`specstack load`: what it prints, what it leaves, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import MODEL, Script, running_server
from run_folders import RawRun, answer, closed, write_folder
from small_scenarios import write_scenario

from specstack.cli import main
from specstack_loadtest.scenario_file import shipped_scenarios

QUICK = Script(first_s=(0.03,), gap_s=(0.005,))
SLOW = Script(first_s=(0.03,), gap_s=(0.015,))


def load(capsys: Any, *words: str | Path) -> tuple[int, str, str]:
    try:
        code = main(["load", *map(str, words)])
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    arrivals = {"kind": "closed", "users": 2}
    return write_scenario(tmp_path, arrivals, {"requests": 12}, warmup={"requests": 2})


@pytest.mark.timing
class TestRun:
    def test_a_baseline_is_run_in_turns_and_all_of_it_can_be_verified(
        self, scenario: Path, tmp_path: Path, capsys: Any
    ) -> None:
        folder = tmp_path / "out"
        with (
            running_server(QUICK, tmp_path / "a") as ours,
            running_server(SLOW, tmp_path / "b") as theirs,
        ):
            words = ("run", scenario, "--url", f"{ours.url}/v1", "--baseline", theirs.url,
                     "--out", folder)  # fmt: skip
            code, out, err = load(capsys, *words)
            assert code == 0, err
            again, _, said = load(capsys, *words, "--format", "json")
        assert "plain" in out
        assert "server" in out
        assert f"report: {folder / 'report.html'}" in err
        assert again == 0
        assert said.count("is there, not run again") == 4
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["sides"] == ["plain", "server"]
        assert set(manifest["files"]) >= {"scenario.yaml", "inputs/prompts.jsonl"}
        assert load(capsys, "report", folder, "--verify")[0] == 0
        code, out, _ = load(capsys, "report", folder, "--verify", "--format", "json")
        assert (code, json.loads(out)) == (0, {"differences": []})
        path = folder / "summary.json"
        path.write_text(path.read_text().replace('"plain"', '"plane"', 1))
        code, _, err = load(capsys, "report", folder, "--verify")
        assert code == 1
        assert "summary.json" in err

    def test_failed_requests_fail_the_run(
        self, scenario: Path, tmp_path: Path, capsys: Any
    ) -> None:
        with running_server(Script(faults={"5": "http_500"}), tmp_path / "a") as server:
            code, out, err = load(
                capsys, "run", scenario, "--url", server.url, "--baseline", "none",
                "--repeats", "1", "--out", tmp_path / "out",
            )  # fmt: skip
        assert code == 1
        assert "(1 failed)" in out
        assert "http_500: 1" in err
        assert "note: No baseline" in err

    def test_a_server_that_is_not_there_is_named(
        self, scenario: Path, tmp_path: Path, capsys: Any
    ) -> None:
        url = "http://127.0.0.1:9"
        code, _, err = load(capsys, "run", scenario, "--url", url, "--out", tmp_path / "out")
        assert code == 1
        assert err.startswith("Error: ")
        assert url in err

    def test_a_model_that_is_not_served_is_refused(
        self, scenario: Path, tmp_path: Path, capsys: Any
    ) -> None:
        with running_server(QUICK, tmp_path / "a") as server:
            words = ("run", scenario, "--url", server.url, "--baseline", "none", "--repeats", "1",
                     "--out", tmp_path / "out")  # fmt: skip
            code, _, err = load(capsys, *words, "--model", "larger")
            assert code == 1
            assert "does not serve 'larger'" in err
            assert load(capsys, *words, "--model", MODEL)[0] == 0

    def test_a_server_elsewhere_is_not_loaded_by_accident(
        self, scenario: Path, capsys: Any
    ) -> None:
        elsewhere, here = "http://192.0.2.1:8000", "http://127.0.0.1:9"
        for words in (("--url", elsewhere), ("--url", here, "--baseline", elsewhere)):
            code, _, err = load(capsys, "run", scenario, *words)
            assert code == 1
            assert "--allow-remote" in err

    def test_an_interrupted_comparison_keeps_and_reports_what_it_has(self, tmp_path: Path) -> None:
        arrivals = {"kind": "closed", "users": 1}
        scenario = write_scenario(tmp_path, arrivals, {"seconds": 60}, warmup={"seconds": 1})
        folder = tmp_path / "out"
        with running_server(QUICK, tmp_path / "a") as server:
            command = [sys.executable, "-m", "specstack", "load", "run", str(scenario),
                       "--url", server.url, "--baseline", "none", "--out", str(folder)]  # fmt: skip
            process = subprocess.Popen(
                command, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            records = folder / "raw/server/0"
            while process.poll() is None and not list(records.glob("requests-*.jsonl")):
                time.sleep(0.2)
            time.sleep(4.0)
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert f"--out {folder}" in err, "how to go on"
        assert (folder / "report.html").exists()
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["results"][0]["requests"]["answered"] > 10
        assert "interrupted" in json.loads((folder / "manifest.json").read_text())["incomplete"][0]


def test_shipped_scenarios_are_listed_with_what_they_are_for(capsys: Any) -> None:
    code, out, _ = load(capsys, "scenarios")
    assert code == 0
    listed = {line.split()[0]: line for line in out.splitlines()}
    assert set(listed) == set(shipped_scenarios()) >= {"smoke", "crossover", "chat-burst"}
    assert all(len(line.split()) > 4 for line in listed.values())
    _, out, _ = load(capsys, "scenarios", "--format", "json")
    assert json.loads(out)["smoke"]["stop"]["requests"] == 8


def test_a_wrong_scenario_is_refused_with_its_line_before_anything_runs(
    tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("version: 1\narrivals: {kind: closed, user: 2}\n")
    out = tmp_path / "out"
    code, _, err = load(capsys, "run", path, "--url", "http://127.0.0.1:9", "--out", out)
    assert code == 2
    assert f"{path}:2:" in err
    assert not out.exists()


def test_what_is_no_folder_of_load_tests_is_said_to_be_none(tmp_path: Path, capsys: Any) -> None:
    code, _, err = load(capsys, "report", tmp_path)
    assert code == 1
    assert "not a folder of load tests" in err


def test_what_a_killed_run_left_is_reported_and_can_be_verified(
    tmp_path: Path, capsys: Any
) -> None:
    """The manifest is of before that run: the one that would have written it was killed, too."""
    folder = write_folder(tmp_path / "out", closed(), {("a", 0): RawRun((answer(11.0),))}, None)
    raw = folder / "raw/a/0"
    (raw / "requests.jsonl").rename(raw / "requests-0.jsonl")
    (raw / "run.json").unlink()
    assert load(capsys, "report", folder, "--verify")[0] == 1
    code, _, err = load(capsys, "report", folder)
    assert code == 0, err
    assert json.loads((folder / "summary.json").read_text())["runs"][0]["requests"] == 1
    assert load(capsys, "report", folder, "--verify") == (
        0, f"{folder}: every number follows from the raw data\n", "",
    )  # fmt: skip
    (raw / "requests-0.jsonl").write_text("")
    assert load(capsys, "report", folder, "--verify")[0] == 1


@pytest.mark.parametrize("command", ["run", "compare"])
def test_help_says_how_commands_end(command: str, capsys: Any) -> None:
    code, out, _ = load(capsys, command, "--help")
    assert code == 0
    listed = out[out.index("Exit codes:") :].splitlines()[1:]
    assert {line.split()[0] for line in listed if line.strip()} >= {"0", "1", "2", "3", "130"}


@pytest.mark.parametrize("command", ["run", "compare", "report", "scenarios"])
def test_help_has_examples(command: str, capsys: Any) -> None:
    code, out, _ = load(capsys, command, "--help")
    assert code == 0
    assert "Examples:" in out
