"""`run_all.py` tells what it found, and what it did not: on the CPU, and with made-up cases."""

from __future__ import annotations

import json
import time
from importlib import import_module

import pytest
import torch
from rich.console import Console

pytestmark = pytest.mark.usefixtures("bench_folder")


@pytest.fixture
def run_all():
    return import_module("run_all")


@pytest.fixture
def harness():
    return import_module("harness")


def run(run_all, tmp_path, *arguments):
    """The exit code and the file."""
    path = tmp_path / "results.json"
    code = run_all.main(["--device", "cpu", "--repeats", "3", "-o", str(path), *arguments])
    return code, json.loads(path.read_text())


@pytest.fixture
def small_bounds(monkeypatch, run_all):
    results = import_module("results")
    monkeypatch.setattr(results, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(results, "MATMUL_SIZE", {"cpu": 64})


def test_two_benchmarks_on_the_cpu(run_all, tmp_path, capsys):
    code, found = run(run_all, tmp_path, "--only", "link_tree", "best_nodes")
    assert code == 0
    assert set(found) == {
        "provenance", "options", "is_finished", "bounds", "tests", "state_after", "cases",
        "failures", "left_out", "targets",
    }  # fmt: skip
    origin = found["provenance"]
    assert set(origin) == {
        "command", "commit", "is_dirty", "date", "versions", "device", "state_before", "host",
        "threads", "seeds",
    }  # fmt: skip
    assert torch.__version__.startswith(origin["versions"]["torch"])
    assert (origin["device"]["kind"], origin["threads"]) == ("cpu", 1)
    assert found["is_finished"]
    assert found["failures"] == found["left_out"] == []
    assert found["bounds"]["copy_bytes_per_s"] > 1e8
    assert [case["op"] for case in found["cases"]] == ["best_nodes"] * 4 + ["link_tree"] * 4
    for case in found["cases"]:
        assert case["error"] is None
        assert len(case["times_ms"]) == len(case["rivals"]["torch"]["times_ms"]) == 3
        assert min(case["times_ms"]) <= case["ms"] <= max(case["times_ms"])
        assert case["gb_per_s"] == pytest.approx(case["num_bytes"] / case["ms"] / 1e6)
        assert 0 < case["share_of_copy"] <= case["share_of_bound"]
        theirs = case["rivals"]["torch"]
        assert theirs["ratio"] == pytest.approx(case["ms"] / theirs["ms"])
    assert len(found["targets"]) == 4
    judged = {(target["verdict"], target["number"]) for target in found["targets"]}
    assert judged == {("not measured", "needs a GPU")}
    shown = capsys.readouterr().out
    assert "link_tree B8 N64" in shown
    assert "8 cases in" in shown


def test_no_gpu_is_an_error_of_usage(run_all, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        run_all.main(["--device", "cuda"])
    assert raised.value.code == 2
    assert "finds no GPU here; --device cpu runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "best_node"], "no benchmark is named best_node; did you mean best_nodes?"),
        (["--repeats", "0"], "--repeats has to be more than 0"),
        (["-o", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_wrong_options(run_all, capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        run_all.main(["--device", "cpu", *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def fake(monkeypatch, run_all, cases):
    """One benchmark, `move_kv`, with these cases."""
    monkeypatch.setattr(run_all, "bench_cases", lambda name: cases)
    return "--only", "move_kv"


def fails(what):
    def call():
        raise RuntimeError(what)

    return call


@pytest.mark.usefixtures("small_bounds")
def test_a_failing_case_is_kept_and_told(run_all, harness, monkeypatch, tmp_path, capsys):
    """Control."""

    def cases(device):
        yield harness.BenchCase("one", "B1", fails("illegal access"), 8, {"sglang": int})
        yield harness.BenchCase("two", "B1", int, 8)

    code, found = run(run_all, tmp_path, *fake(monkeypatch, run_all, cases))
    assert code == 1
    assert found["failures"] == ["one B1: RuntimeError: illegal access"]
    assert [case["error"] for case in found["cases"]] == ["RuntimeError: illegal access", None]
    assert found["cases"][0]["rivals"]["sglang"]["error"] == "ours failed"
    assert "failed one B1: RuntimeError: illegal access" in capsys.readouterr().out


@pytest.mark.usefixtures("small_bounds")
def test_a_benchmark_that_breaks_off(run_all, harness, monkeypatch, tmp_path):
    def cases(device):
        yield harness.BenchCase("one", "B1", int, 8)
        raise torch.OutOfMemoryError("no room")

    code, found = run(run_all, tmp_path, *fake(monkeypatch, run_all, cases))
    assert code == 1
    assert found["failures"] == ["move_kv: making case 2: OutOfMemoryError: no room"]
    assert len(found["cases"]) == 1


@pytest.mark.usefixtures("small_bounds")
def test_a_rival_that_cannot_be_had_is_no_failure(run_all, harness, monkeypatch, tmp_path):
    """It is tried once, unless it only lacked memory."""
    tries = []

    def absent():
        tries.append("absent")
        raise ImportError("No module named 'sglang'")

    def large():
        tries.append("large")
        raise torch.OutOfMemoryError("no room")

    def cases(device):
        rivals = {"sglang": harness.Lazy(absent), "flashinfer": harness.Lazy(large)}
        for batch in (1, 2):
            yield harness.BenchCase("one", f"B{batch}", int, 8, {**rivals, "torch": int})

    code, found = run(run_all, tmp_path, *fake(monkeypatch, run_all, cases))
    assert code == 0
    assert sorted(tries) == ["absent", "large", "large"]
    for case in found["cases"]:
        assert case["rivals"]["sglang"]["error"] == "ImportError: No module named 'sglang'"
        assert case["rivals"]["flashinfer"]["error"] == "OutOfMemoryError: no room"
        assert case["rivals"]["torch"]["ratio"] > 0


@pytest.mark.usefixtures("small_bounds")
def test_a_killed_run_leaves_what_it_had(run_all, harness, monkeypatch, tmp_path):
    def cases(device):
        yield harness.BenchCase("one", "B1", int, 8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(run_all, tmp_path, *fake(monkeypatch, run_all, cases))
    found = json.loads((tmp_path / "results.json").read_text())
    assert not found["is_finished"]
    assert [case["op"] for case in found["cases"]] == ["one"]


@pytest.mark.usefixtures("small_bounds")
def test_what_there_was_no_time_for_is_said(run_all, harness, monkeypatch, tmp_path):
    def cases(device):
        yield harness.BenchCase("one", "B1", int, 8)
        clock.append(1e9)
        yield harness.BenchCase("two", "B1", int, 8, {"torch": int})
        yield harness.BenchCase("three", "B1", int, 8)

    clock = [time.monotonic()]
    monkeypatch.setattr(run_all.time, "monotonic", lambda: clock[-1])
    only = fake(monkeypatch, run_all, cases)
    code, found = run(run_all, tmp_path, *only, "link_tree")
    assert code == 0
    # What was begun is timed; its rival is not.
    assert found["left_out"] == ["link_tree after 2 cases: no time left", "move_kv: no time left"]
    assert found["cases"][1]["rivals"]["torch"]["error"] == "no time left"


TESTS = """
import pytest
@pytest.mark.parametrize("x", [1, 2])
def test_well(x): pass
def test_wrong(): assert 1 == 2, "not so"
def test_other(): pytest.skip("elsewhere")
"""


def test_tests_are_counted(tmp_path):
    gpu_tests = import_module("gpu_tests")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text("")
    files, seen = sorted(tmp_path.glob("test_*.py")), []
    none, some = gpu_tests.run_tests(files, time.monotonic() + 60, 2, seen.append)
    assert (some.passed, some.skipped, some.is_finished) == (2, 1, True)
    (failure,) = some.failures
    assert failure.startswith("test_wrong: AssertionError: not so")
    assert none.failures[0].startswith("pytest ended with 5: ")
    assert {outcome.file for outcome in seen} == {"test_none.py", "test_some.py"}
    (late,) = gpu_tests.run_tests(files[:1], time.monotonic(), 1, seen.append)
    assert not late.is_finished


def test_the_tests_of_the_named_ops_are_run_and_kept(run_all, monkeypatch, tmp_path, capsys):
    gpu_tests, results = import_module("gpu_tests"), import_module("results")
    files = gpu_tests.kernel_test_files(["move_kv", "accept_typical"])
    assert [path.name for path in files] == ["test_move_kv.py"]
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.setattr(run_all, "kernel_test_files", lambda names: [tmp_path / "test_some.py"])
    file = results.ResultFile(tmp_path / "results.json", {})
    soon = time.monotonic() + 60
    outcomes = run_all.run_kernel_tests(["move_kv"], soon, 1, file, Console(width=100))
    counts = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 1, 1)
    assert not run_all.are_well(outcomes)
    shown = capsys.readouterr().out
    assert "test_some.py test_wrong: AssertionError: not so" in shown
    assert "tests: 2 passed, 1 failed, 1 skipped, 0 files not over in time" in shown


def test_tests_that_are_late_fail_the_run(run_all):
    file_outcome = import_module("gpu_tests").FileOutcome
    well, late = file_outcome("a", 3, 0, ()), file_outcome("b", 0, 0, (), is_finished=False)
    assert run_all.are_well([well])
    assert not run_all.are_well([well, late])
    assert run_all.tests_json([well, late])["files_not_over_in_time"] == 1
