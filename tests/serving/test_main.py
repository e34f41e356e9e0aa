"""`specstack serve` refuses what cannot be served, before the engine is loaded."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from specstack.cli import main as specstack
from specstack.processes import free_port
from specstack_serving import main
from specstack_serving.address import base_url, port_problem
from specstack_serving.carrier import PLAN_VARIABLE, current_plan
from specstack_serving.sglang_compat import SGLANG_VERSION

QUICKSTART = str(Path(__file__).parents[2] / "dsl" / "specs" / "quickstart.yaml")
CRASH_WAIT = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Commands that would have been supervised; nothing is fetched or started."""
    commands: list[list[str]] = []

    class Supervisor:
        def __init__(self, command: list[str], say: Any) -> None:
            commands.append(command)

        def run(self) -> int:
            return 143

    monkeypatch.setattr(main, "Supervisor", Supervisor)
    monkeypatch.setattr(main, "ensure", lambda name: None)
    monkeypatch.setattr(main, "installed_version", lambda: SGLANG_VERSION)
    monkeypatch.setenv(PLAN_VARIABLE, "")
    monkeypatch.setenv("SGLANG_PLATFORM", "")
    monkeypatch.setenv(CRASH_WAIT, "unset below; restored afterwards")
    monkeypatch.delenv(CRASH_WAIT)
    yield commands
    current_plan.cache_clear()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line; gives its exit code and what it wrote to stderr."""

    def run(*arguments: str, file: str = QUICKSTART) -> tuple[int, str]:
        try:
            code = specstack(["serve", file, *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().err

    return run


def at(port: int) -> tuple[str, str]:
    return "--set", f"engine.port={port}"


def test_a_good_pipeline_is_handed_to_the_engine(say: Any, started: list[list[str]]) -> None:
    port = free_port()
    code, text = say(*at(port), "--set", "engine.device=cpu")
    assert code == 143, "the supervisor's code is the command's"
    assert [command[1:] for command in started] == [["-m", "specstack_serving.engine"]]
    plan = current_plan()
    assert plan is not None
    assert plan.engine.port == port
    assert text.splitlines() == [
        f"specstack: plan {plan.hash[:12]}: packaged:smollm2-135m-instruct, drafter merge, "
        "tree best_first, up to 15 drafts per round, on cpu",
        f"specstack: starting SGLang {SGLANG_VERSION}: http://127.0.0.1:{port}/v1",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_named_with_a_way_out(say: Any, started: Any, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        assert say(*at(port), "--set", f"engine.host={host}") == (
            1,
            f"Error: {host}:{port} is in use: stop its owner, or --set engine.port={port + 1}\n",
        )
    assert started == []


def test_a_cost_table_that_cannot_be_read_is_named_before_the_engine_starts(
    say: Any, started: list[list[str]], tmp_path: Path
) -> None:
    goodput = "budget={kind: goodput, choices: [0, 1, 3], costs: %s}"
    code, err = say("--set", goodput % (tmp_path / "none.json"))
    assert code == 1
    assert "budget.costs: " in err
    assert "none.json: No such file" in err
    (tmp_path / "other.json").write_text("{}")
    code, err = say("--set", goodput % (tmp_path / "other.json"))
    assert code == 1
    assert "other.json is no cost table" in err
    assert not started


def test_a_port_that_was_just_used_is_free() -> None:
    """A restarted server must not wait for the connections of the last one to be forgotten."""
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = owner.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.recv(1)
        client.close()
    assert port_problem("127.0.0.1", port) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied"),
         "127.0.0.1:80: this user may not listen there: choose a port from 1024 on"),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"),
         "127.0.0.1:80: Cannot assign requested address"),
        (OSError(errno.EADDRINUSE, ""),
         "127.0.0.1:80 is in use: stop its owner, or --set engine.port=81"),
    ],
)  # fmt: skip
def test_a_port_that_cannot_be_had_says_why(
    say: Any, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    def refuse(self: Any, address: Any) -> None:
        raise error

    monkeypatch.setattr(socket.socket, "bind", refuse, raising=False)
    assert say(*at(80)) == (1, f"Error: {said}\n")


def test_a_host_without_an_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert port_problem("nowhere", 80) == "nowhere:80: Name or service not known"


def test_the_last_port_has_no_next_one() -> None:
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            owner.bind(("127.0.0.1", 65535))
        except OSError:
            pytest.skip("somebody has it")
        owner.listen()
        assert port_problem("127.0.0.1", 65535) == (
            "127.0.0.1:65535 is in use: stop its owner, or --set engine.port=65534"
        )


def test_addresses_of_either_version_make_urls() -> None:
    assert base_url("127.0.0.1", 30000) == "http://127.0.0.1:30000"
    assert base_url("::1", 30000) == "http://[::1]:30000"
    with socket.socket(socket.AF_INET6) as owner:
        try:
            owner.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6")
        owner.listen()
        port = owner.getsockname()[1]
        assert str(port_problem("::1", port)).startswith(f"[::1]:{port} is in use")
    assert port_problem("::1", port) is None


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "SGLang is not installed: pip install 'specstack[serve]' (11 GB, Linux)"),
        ("0.5.22", f"SGLang 0.5.22 is installed, specstack runs inside {SGLANG_VERSION}: "
         f"pip install sglang=={SGLANG_VERSION}; `specstack doctor` lists what differs"),
    ],
)  # fmt: skip
def test_another_sglang_is_refused(
    say: Any, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    monkeypatch.setattr(main, "installed_version", lambda: version)
    assert say(*at(free_port())) == (1, f"Error: {said}\n")


@pytest.mark.parametrize(("platform", "code"), [("other", 1), ("specstack_cpu", 143)])
def test_a_platform_that_hides_ours_is_refused(
    say: Any, monkeypatch: pytest.MonkeyPatch, platform: str, code: int
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", platform)
    got, text = say(*at(free_port()))
    assert got == code
    refusal = (
        "Error: SGLANG_PLATFORM=other makes SGLang skip the plug-ins of other packages, "
        "specstack's too: unset it\n"
    )
    assert (text == refusal) is (code == 1)


def test_an_unknown_packaged_model_does_not_fit(say: Any, started: Any) -> None:
    code, text = say("--set", "target=packaged:smollm2-135m")
    assert code == 3
    assert "target.model: no packaged model 'smollm2-135m': there are smollm2-135m-instruct" in text
    assert started == []


def test_a_missing_file_is_wrong_text(say: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "none.yaml")
    code, text = say(file=file)
    assert code == 2
    assert text.startswith(f"{file}: ")
    assert text.count("\n") == 1


def test_malformed_yaml_is_named_by_line(say: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("version: 1\ntarget: [\n")
    code, text = say(file=str(file))
    assert code == 2
    assert text.startswith(f"{file}:3:1: ")
    assert "Traceback" not in text


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.GatedRepoError("x", response=RESPONSE),
         "it needs a licence agreement: accept it on the model's page, then `hf auth login`"),
        (errors.RepositoryNotFoundError("x", response=RESPONSE),
         "no such model on the hub (or it is private: `hf auth login`)"),
        (errors.LocalEntryNotFoundError("x"),
         "the hub cannot be reached and the model is not in its local cache"),
        (errors.RevisionNotFoundError("no revision v2\nmore", response=RESPONSE), "no revision v2"),
        (errors.HFValidationError("bad name"), "bad name"),
    ],
)  # fmt: skip
def test_a_hub_model_that_cannot_be_had_says_why(
    say: Any, started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    error: Exception, said: str,
) -> None:  # fmt: skip
    asked: list[Any] = []

    def download(*args: Any, **kwargs: Any) -> None:
        asked.append((args, kwargs))
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    options = ("target=org/model", "engine.args.revision=v2", "engine.max_total_tokens=4096")
    settings = [word for option in options for word in ("--set", option)]
    code, text = say(*at(free_port()), *settings)
    assert (code, started) == (1, [])
    assert text == (
        f"specstack: fetching the config of org/model\nError: target org/model: {said}\n"
    )
    assert asked == [(("org/model", "config.json"), {"revision": "v2"})]


def test_the_engines_crash_dump_does_not_delay_the_end(say: Any) -> None:
    say(*at(free_port()))
    assert os.environ[CRASH_WAIT] == "0"
