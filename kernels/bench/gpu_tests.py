"""The tests of `tests/kernels/triton` on a GPU, in processes of their own.

Most of their time is compilation on the host, so that several files run at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "kernels" / "triton"
MAX_MESSAGE = 500


@dataclass(frozen=True)
class FileOutcome:
    """What one file of tests came to."""

    file: str
    passed: int
    skipped: int
    failures: tuple[str, ...]
    """`name: first line`; also if pytest could not run, or collected nothing."""
    is_finished: bool = True
    """False if time ran out."""
    seconds: float = 0.0


def kernel_test_files(ops: Sequence[str]) -> list[Path]:
    """Those of the ops that have some."""
    return [path for op in ops if (path := FOLDER / f"test_{op}.py").exists()]


def run_tests(
    files: Sequence[Path], deadline: float, jobs: int, on_done: Callable[[FileOutcome], None]
) -> list[FileOutcome]:
    """Run each file under pytest, `jobs` at a time, until `deadline` of `time.monotonic`."""

    def run(file: Path) -> FileOutcome:
        outcome = _run_file(file, deadline)
        on_done(outcome)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, files))


def _run_file(file: Path, deadline: float) -> FileOutcome:
    started = time.monotonic()
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(file), "-q", "--tb=short",
                   "-p", "no:cacheprovider", f"--junitxml={report}"]  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True,
                timeout=max(0.0, deadline - started),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - started
            return FileOutcome(file.name, 0, 0, (), is_finished=False, seconds=seconds)
        seconds = time.monotonic() - started
        if done.returncode not in (0, 1) or not report.exists():
            last = (done.stdout + done.stderr)[-MAX_MESSAGE:].strip()
            failure = f"pytest ended with {done.returncode}: {last}"
            return FileOutcome(file.name, 0, 0, (failure,), seconds=seconds)
        return _read_report(file.name, report, seconds)


def _read_report(name: str, report: Path, seconds: float) -> FileOutcome:
    passed, skipped, failures = 0, 0, []
    for test in ElementTree.parse(report).getroot().iter("testcase"):
        faults = [fault for kind in ("failure", "error") for fault in test.findall(kind)]
        if faults:
            message = (faults[0].get("message") or "").strip().partition("\n")[0]
            failures.append(f"{test.get('name')}: {message[:MAX_MESSAGE]}")
        elif test.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return FileOutcome(name, passed, skipped, tuple(failures), seconds=seconds)
