"""`specstack doctor`: its exit code, its words, its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specstack.cli import main as specstack
from specstack_serving import doctor
from specstack_serving.contract import Finding

GOOD = Finding("ForwardMode", "sglang.srt.x:ForwardMode", None)
BAD = Finding("Req", "sglang.srt.y:Req", "no member get_fill_ids")


def run(*options: str) -> int:
    with pytest.raises(SystemExit) as end:
        specstack(["doctor", *options])
    return int(end.value.code or 0)


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    found = [GOOD]
    monkeypatch.setattr(doctor, "installed_root", lambda: Path("/engine"))
    monkeypatch.setattr(doctor, "installed_version", lambda: "0.5.23")
    monkeypatch.setattr(doctor, "check", lambda root, version: found)
    return found


@pytest.mark.usefixtures("findings")
def test_a_good_installation_is_silent_about_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    assert "1 names of SGLang checked, 0 not as expected" in text
    assert "ForwardMode" not in text


@pytest.mark.usefixtures("findings")
def test_all_lists_what_is_as_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--all") == 0
    text = capsys.readouterr().out
    assert "ForwardMode" in text
    assert "as expected" in text


def test_a_problem_is_named_and_fails(
    findings: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    findings.append(BAD)
    assert run() == 1
    text = capsys.readouterr().out
    assert "no member" in text
    assert "2 names of SGLang checked, 1 not as expected" in text


def test_json_holds_every_finding(
    findings: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    findings.append(BAD)
    assert run("--format", "json") == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["sglang"] == "0.5.23"
    assert report["host"]["num_cpus"] >= 1
    assert [f["problem"] for f in report["findings"]] == [None, "no member get_fill_ids"]


def test_a_missing_engine_fails_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "installed_root", lambda: None)
    monkeypatch.setattr(doctor, "installed_version", lambda: None)
    assert run("--format", "json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["problem"] == "not installed: pip install 'specstack[serve]'"
    assert run() == 1
    assert "specstack[serve]" in capsys.readouterr().out
