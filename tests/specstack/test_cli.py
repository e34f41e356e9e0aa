"""The command line: outputs, exit codes, help, and what it must not import."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from specstack.applications import APPLICATIONS
from specstack.cli import cli, main

SPECS = Path(__file__).parents[2] / "dsl/specs"
QUICKSTART = str(SPECS / "quickstart.yaml")
COMMANDS = ("check", "explain", "schema", "parts", "compile", "diff")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    file = tmp_path / "wrong.yaml"
    file.write_text("version: 1\ntarget: org/m\ntree: chan\n")
    return str(file)


@pytest.fixture
def mla(tmp_path: Path) -> str:
    config = {
        "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9,
        "kv_lora_rank": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "mla.yaml"
    file.write_text(f"version: 1\ntarget: {tmp_path}\n")
    return str(file)


class TestCheck:
    def test_a_sound_file(self, capsys: Any) -> None:
        assert run(capsys, "check", QUICKSTART) == (0, f"{QUICKSTART}: ok\n", "")

    def test_a_wrong_text(self, capsys: Any, wrong: str) -> None:
        code, out, _ = run(capsys, "check", wrong)
        assert code == 2
        assert out.startswith(f"{wrong}:3:7: tree.kind: expected one of chain, static")

    def test_a_contradiction_with_the_model(self, capsys: Any, mla: str) -> None:
        code, out, _ = run(capsys, "check", mla)
        assert code == 3
        assert "(MLA)" in out

    def test_the_worst_file_decides_in_any_order(self, capsys: Any, wrong: str, mla: str) -> None:
        for files in ((wrong, mla, QUICKSTART), (QUICKSTART, mla, wrong)):
            assert run(capsys, "check", *files)[0] == 2
        assert run(capsys, "check", mla, QUICKSTART)[0] == 3

    def test_it_does_not_ask_for_this_machine(self, capsys: Any) -> None:
        overrides = ("--set", "engine.device=cuda", "--set", "target.dtype=float16")
        assert run(capsys, "check", QUICKSTART, *overrides)[0] == 0

    def test_warnings_are_said(self, capsys: Any) -> None:
        _, out, _ = run(capsys, "check", QUICKSTART, "--set", "target.dtype=bfloat16")
        assert f"{QUICKSTART}: warning: target.dtype bfloat16 on cpu" in out

    def test_json(self, capsys: Any, wrong: str) -> None:
        code, out, _ = run(capsys, "check", QUICKSTART, wrong, "--format", "json")
        sound, unsound = json.loads(out)["files"]
        assert code == 2
        assert sound == {"file": QUICKSTART, "problems": []}
        (problem,) = unsound["problems"]
        assert (problem["line"], problem["column"], problem["path"]) == (3, 7, "tree.kind")
        assert problem["file"] == wrong
        assert problem["rule"] == "types"

    def test_sarif(self, capsys: Any, wrong: str) -> None:
        _, out, _ = run(capsys, "check", wrong, "--format", "sarif")
        log = json.loads(out)
        (result,) = log["runs"][0]["results"]
        assert log["version"] == "2.1.0"
        assert result["ruleId"] in [r["id"] for r in log["runs"][0]["tool"]["driver"]["rules"]]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == wrong
        assert place["region"] == {"startLine": 3, "startColumn": 7}

    def test_sarif_places_an_override_in_the_checked_file(self, capsys: Any) -> None:
        _, out, _ = run(capsys, "check", QUICKSTART, "--set", "engine.port=0", "--format", "sarif")
        (result,) = json.loads(out)["runs"][0]["results"]
        place = result["locations"][0]["physicalLocation"]
        assert place == {"artifactLocation": {"uri": QUICKSTART}}

    def test_no_file_is_a_usage_error(self, capsys: Any) -> None:
        code, _, err = run(capsys, "check")
        assert code == 2
        assert "Missing argument" in err

    def test_a_missing_file(self, capsys: Any) -> None:
        code, out, _ = run(capsys, "check", "no.yaml")
        assert (code, out) == (2, "no.yaml: cannot read the file: no such file or directory\n")


class TestExplain:
    def test_text_names_values_origins_arguments_shapes_and_memory(self, capsys: Any) -> None:
        code, out, _ = run(capsys, "explain", QUICKSTART)
        assert code == 0
        for line in (
            r"^plan [0-9a-f]{12}$",
            r"nodes per verify step = drafts \+ 1: 1 2 4 8 16$",
            r"^ +tree\.depth +8 +\S*quickstart\.yaml:8",
            r"^ +drafter\.max_depth +8 +derived: the depth of the tree",
            r"^ +metrics\.prefix +specstack +default",
            r"^ +metrics\.trace +none +default",
            r"^ +speculative_algorithm +SPECSTACK",
            r"^ +kv_per_token +45\.0 KiB",
            r"^ +LoRA +SGLang allows",
        ):
            assert re.search(line, out, re.MULTILINE), line

    def test_json(self, capsys: Any) -> None:
        _, out, _ = run(capsys, "explain", QUICKSTART, "--format", "json")
        data = json.loads(out)
        values = {value["path"]: value for value in data["values"]}
        assert values["tree.depth"]["value"] == 8
        assert values["tree.depth"]["origin"].endswith("quickstart.yaml:8")
        assert data["sglang_args"]["device"] == "cpu"
        assert data["shapes"]["verify_widths"] == [1, 2, 4, 8, 16]
        assert data["memory_bytes"]["kv_per_token"] == 46080
        assert "LoRA" in data["unsupported"]

    def test_plain_decoding_excludes_nothing(self, capsys: Any) -> None:
        _, out, _ = run(
            capsys, "explain", QUICKSTART, "--set", "drafter=none", "--set",
            "budget={kind: fixed, draft_budget: 0}", "--format", "json",
        )  # fmt: skip
        data = json.loads(out)
        assert set(data["unsupported"]) == {"CUDA graphs"}
        assert data["memory_bytes"]["tree_logits"] == 0

    def test_a_greedy_rule_says_that_it_cannot_sample(self, capsys: Any) -> None:
        _, out, _ = run(capsys, "explain", QUICKSTART, "--set", "verify=greedy")
        assert "temperature above 0" in out

    def test_an_unknown_model_is_said(self, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        _, out, _ = run(capsys, "explain", str(SPECS / "plain.yaml"))
        assert "not in the local cache: its config is unknown until downloaded" in out
        assert "not known here" in out

    def test_a_wrong_text_goes_to_standard_error(self, capsys: Any, wrong: str) -> None:
        code, out, err = run(capsys, "explain", wrong)
        assert (code, out) == (2, "")
        assert err.startswith(f"{wrong}:3:7: tree.kind: ")

    def test_a_contradiction_exits_with_3(self, capsys: Any, mla: str) -> None:
        code, out, err = run(capsys, "explain", mla)
        assert (code, out) == (3, "")
        assert "(MLA)" in err


class TestOthers:
    def test_schema(self, capsys: Any) -> None:
        _, out, _ = run(capsys, "schema")
        assert json.loads(out)["title"] == "specstack pipeline"

    def test_parts(self, capsys: Any) -> None:
        _, out, _ = run(capsys, "parts")
        assert "drafter ngram " in out
        assert "\nengine " in out

    @pytest.mark.parametrize(
        ("name", "line"),
        [
            ("ngram", "min_match        Fewest last tokens that must recur (default 2)"),
            ("fixed", "0: plain decoding (required)"),
            ("budget", "budget table"),
            ("best_first", "needs: drafts"),
            ("target", "provides: logits, target_features, tokens"),
            ("verify", "implementation: specstack.verify.greedy:GreedyRule"),
        ],
    )
    def test_one_part(self, capsys: Any, name: str, line: str) -> None:
        code, out, _ = run(capsys, "parts", name)
        assert code == 0
        assert line in out

    def test_an_unknown_part(self, capsys: Any) -> None:
        code, _, err = run(capsys, "parts", "ngrams")
        assert code == 2
        assert "no part or section 'ngrams'" in err
        assert "did you mean 'ngram'?" in err

    def test_compile(self, capsys: Any, tmp_path: Path) -> None:
        from specstack.plan import Plan

        file = tmp_path / "plan.json"
        assert run(capsys, "compile", QUICKSTART, "-o", str(file)) == (0, "", "")
        _, out, _ = run(capsys, "compile", QUICKSTART)
        assert Plan.model_validate_json(file.read_text()) == Plan.model_validate_json(out)

    def test_compile_into_nowhere(self, capsys: Any, tmp_path: Path) -> None:
        code, _, err = run(capsys, "compile", QUICKSTART, "-o", str(tmp_path / "no/plan.json"))
        assert code == 1
        assert "No such file or directory" in err

    def test_diff(self, capsys: Any) -> None:
        code, out, _ = run(capsys, "diff", str(SPECS / "ngram.yaml"), str(SPECS / "chain.yaml"))
        assert code == 0
        assert out.splitlines()[:2] == [
            "drafter.max_depth: 12 -> 8",
            'tree.kind: "best_first" -> "chain"',
        ]

    def test_diff_of_the_same(self, capsys: Any) -> None:
        assert run(capsys, "diff", QUICKSTART, QUICKSTART) == (0, "", "")

    def test_diff_as_json(self, capsys: Any) -> None:
        _, out, _ = run(
            capsys, "diff", str(SPECS / "ngram.yaml"), str(SPECS / "chain.yaml"), "--format", "json"
        )
        assert json.loads(out)["tree.depth"] == [12, 8]


class TestHelp:
    def test_it_lists_applications_without_importing_them(self, capsys: Any) -> None:
        _, out, _ = run(capsys, "--help")
        for name, application in APPLICATIONS.items():
            assert re.search(rf"^  {name} +{re.escape(application.summary)}$", out, re.M)

    def test_exit_codes_are_listed(self, capsys: Any) -> None:
        _, out, _ = run(capsys, "--help")
        for code in ("0 ", "1 ", "2 ", "3 ", "130"):
            assert re.search(rf"^ +{code} +\w", out, re.M)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_examples_that_it_accepts(self, name: str) -> None:
        command = cli.commands[name]
        examples = re.findall(r"^ *specstack (.+)$", command.help or "", re.M)
        assert examples
        for example in examples:
            words = example.partition(" > ")[0].split()
            assert words[0] == name
            command.make_context(name, words[1:])

    def test_an_unknown_command_gets_the_nearest_name(self, capsys: Any) -> None:
        code, _, err = run(capsys, "explian")
        assert code == 2
        assert "no command 'explian'; did you mean 'explain'?" in err

    def test_an_application_without_its_package(self, capsys: Any, monkeypatch: Any) -> None:
        monkeypatch.setitem(sys.modules, "specstack_serving.main", None)
        code, _, err = run(capsys, "serve", "x.yaml")
        assert code == 1
        assert "pip install 'specstack[serve]'" in err

    def test_version(self, capsys: Any) -> None:
        from specstack import __version__

        assert run(capsys, "--version")[1] == f"specstack, version {__version__}\n"


class TestFailures:
    def fail_with(self, monkeypatch: Any, error: BaseException) -> None:
        def fail(**_: Any) -> None:
            raise error

        monkeypatch.setitem(cli.commands, "schema", click.Command("schema", callback=fail))

    def test_an_interrupt(self, capsys: Any, monkeypatch: Any) -> None:
        self.fail_with(monkeypatch, KeyboardInterrupt())
        code, _, err = run(capsys, "schema")
        assert code == 130
        assert err.strip() == "interrupted"

    def test_a_model_that_cannot_be_had(self, capsys: Any, monkeypatch: Any) -> None:
        from specstack.models.errors import ModelError

        self.fail_with(monkeypatch, ModelError("no network", "connect"))
        assert run(capsys, "schema") == (1, "", "specstack: no network\n  hint: connect\n")

    def test_parts_that_contradict_each_other(self, capsys: Any, monkeypatch: Any) -> None:
        from specstack_dsl.parts import CatalogueError

        self.fail_with(monkeypatch, CatalogueError("two parts"))
        assert run(capsys, "schema") == (1, "", "specstack: two parts\n")

    def test_a_fault_of_our_own_keeps_its_traceback(self, monkeypatch: Any) -> None:
        self.fail_with(monkeypatch, AssertionError("ours"))
        with pytest.raises(AssertionError):
            main(["schema"])


def test_a_signal_ends_the_process_with_130(tmp_path: Path) -> None:
    """Reading a pipe that nobody writes to waits; Ctrl-C ends it without a traceback."""
    import os

    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "specstack", "check", str(pipe)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    writer = os.open(pipe, os.O_WRONLY)  # returns once the command has opened the pipe
    try:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        os.close(writer)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_check_starts_quickly() -> None:
    """The best of three fresh processes, so that a busy machine does not decide."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "specstack", "check", QUICKSTART], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2


def test_an_interrupt_during_the_imports_is_the_systems_own() -> None:
    script = """
import builtins, signal, sys
import specstack.__main__ as entry
real, seen = builtins.__import__, []
def spy(name, *args, **kwargs):
    if name == "specstack.cli":
        seen.append(signal.getsignal(signal.SIGINT))
    return real(name, *args, **kwargs)
builtins.__import__ = spy
sys.argv = ["specstack", "parts"]
code = entry.run()
assert seen[0] == signal.SIG_DFL and code == 0
assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
"""
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
