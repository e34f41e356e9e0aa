"""`specstack draft regenerate` against a server without a model: results, refusals, exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specstack.cli import main
from specstack.training import chat_client, regenerate_job
from specstack.training.answer_file import writing
from specstack.training.answers import read_answers
from specstack.training.cli import draft
from specstack.training.testing import HANG_UP, MODEL, Reply, StubServer, completion, stub_server

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    """It has to be reached past any proxy of the environment, and pauses are short."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr(chat_client, "FIRST_DELAY_S", 0.001)
    with stub_server() as stub:
        yield stub


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"id": "p{i}", "prompt": "text {i}"}}\n' for i in range(1, 9)))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


@pytest.fixture
def run(server: StubServer, prompts: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*options: str, where: tuple[str, ...] = ()) -> tuple[int, str, str]:
        at = where or ("--url", server.url)
        code = main(["draft", "regenerate", str(prompts), "-o", str(out), *at, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def lines(out: Path) -> list[int]:
    return sorted(answer.line for answer in read_answers(out))


def failing(body: dict[str, Any], *texts: str, reply: Reply) -> Reply:
    return reply if body["messages"][-1]["content"] in texts else completion(body)


def test_every_prompt_is_answered_once(run: Run, server: StubServer, out: Path) -> None:
    code, said, _ = run("--temperature", "0.5", "--seed", "100", "--extra-body", '{"min_p": 0.1}')
    assert code == 0
    assert said.startswith("8 answers, 24 tokens in ")
    assert said.endswith(f"0 failed, 0 lines skipped, 0 answered before\n{out}\n")
    assert lines(out) == list(range(1, 9))
    answer = next(a for a in read_answers(out) if a.line == 3)
    assert answer.id == "p3"
    assert [m["content"] for m in answer.messages] == ["text 3", "TEXT 3"]
    assert (answer.input_ids, answer.output_ids) == ((1, 2), (3, 4, 5))
    [request] = [r for r in server.requests if r["messages"][0]["content"] == "text 3"]
    assert request == {
        "model": MODEL, "messages": [{"role": "user", "content": "text 3"}], "max_tokens": 256,
        "temperature": 0.5, "top_p": 1.0, "seed": 103, "min_p": 0.1, "return_token_ids": True,
    }  # fmt: skip


def test_the_settings_are_beside_the_answers(run: Run, server: StubServer, out: Path) -> None:
    run("--num", "2")
    run()
    meta = json.loads(out.with_suffix(".meta.json").read_text())
    assert meta["settings"]["model"] == MODEL
    assert re.fullmatch("[0-9a-f]{64}", meta["settings"]["prompts_sha256"])
    assert meta["prompts"] == "prompts.jsonl"
    assert [r["server"] for r in meta["runs"]] == [{"url": server.url}] * 2


def test_more_prompts_of_the_same_file_extend_the_answers(run: Run, out: Path) -> None:
    assert run("--num", "3")[0] == 0
    assert lines(out) == [1, 2, 3]
    code, said, _ = run("--num", "6", "--format", "json")
    summary = json.loads(said)
    assert code == 0
    assert (summary["answered_before"], summary["answers"], summary["prompts"]) == (3, 3, 6)
    assert lines(out) == [1, 2, 3, 4, 5, 6]


def test_when_all_is_answered_no_server_is_needed(run: Run, out: Path) -> None:
    run()
    code, said, _ = run("--format", "json", where=("--url", "http://127.0.0.1:9/v1"))
    assert code == 0
    assert json.loads(said)["answered_before"] == 8


def test_as_many_requests_as_asked_are_in_flight(run: Run, server: StubServer, out: Path) -> None:
    together = threading.Barrier(4, timeout=10)

    def wait(body: dict[str, Any]) -> Reply:
        together.wait()
        return completion(body)

    server.behaviour = wait
    assert run("--concurrency", "4")[0] == 0
    assert lines(out) == list(range(1, 9))


def test_no_more_requests_than_asked_are_in_flight(run: Run, server: StubServer) -> None:
    busy = threading.Semaphore(2)

    def count(body: dict[str, Any]) -> Reply:
        if not busy.acquire(blocking=False):
            return 400, "a third request"
        threading.Event().wait(0.02)
        busy.release()
        return completion(body)

    server.behaviour = count
    assert run("--concurrency", "2")[0] == 0


@pytest.mark.parametrize(
    "trouble", [(500, "oops"), (503, ""), (429, "slow down"), completion({"messages": [
        {"content": ""}]}, finish_reason="abort")],
)  # fmt: skip
def test_trouble_of_the_moment_is_tried_again(
    run: Run, server: StubServer, out: Path, trouble: Reply
) -> None:
    asked: Counter[str] = Counter()

    def first_two_fail(body: dict[str, Any]) -> Reply:
        text = body["messages"][-1]["content"]
        asked[text] += 1
        return trouble if asked[text] <= 2 else completion(body)

    server.behaviour = first_two_fail
    assert run("--retries", "2")[0] == 0
    assert set(asked.values()) == {3}
    assert lines(out) == list(range(1, 9))


def test_trouble_that_lasts_fails_the_prompt(run: Run, server: StubServer, out: Path) -> None:
    server.behaviour = lambda body: failing(body, "text 2", reply=(500, "oops"))
    code, said, _ = run("--retries", "1", "--max-failed-share", "0.2")
    assert code == 1
    assert "1 failed" in said
    [failure] = map(json.loads, out.with_suffix(".failed.jsonl").read_text().splitlines())
    assert failure == {"line": 2, "id": "p2", "reason": "500: oops (2 attempts)"}
    assert lines(out) == [1, 3, 4, 5, 6, 7, 8]


def test_a_slow_answer_is_a_timeout(run: Run, server: StubServer, out: Path) -> None:
    go = threading.Event()

    def slow(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["content"] == "text 2":
            go.wait(10)
        return completion(body)

    server.behaviour = slow
    code, _, _ = run("--retries", "0", "--timeout", "0.5", "--max-failed-share", "1")
    go.set()
    assert code == 1
    assert "timeout: ReadTimeout (1 attempts)" in out.with_suffix(".failed.jsonl").read_text()


@pytest.mark.parametrize("reply", [(400, "too long"), (200, "<html>"), (200, {"choices": []})])
def test_a_refused_prompt_fails_at_once_and_is_tried_by_the_next_run(
    run: Run, server: StubServer, out: Path, reply: Reply
) -> None:
    server.behaviour = lambda body: failing(body, "text 2", "text 5", reply=reply)
    code, said, _ = run("--max-failed-share", "0.25", "--format", "json")
    summary = json.loads(said)
    assert (code, summary["failed"], summary["answers"]) == (1, 2, 6)
    assert summary["failures_file"] == str(out.with_suffix(".failed.jsonl"))
    assert len(server.requests) == 8
    server.behaviour = completion
    assert run()[0] == 0
    assert lines(out) == list(range(1, 9))
    assert not out.with_suffix(".failed.jsonl").exists()


def test_too_many_failures_end_the_run(run: Run, server: StubServer, out: Path) -> None:
    server.behaviour = lambda body: failing(body, "text 3", "text 4", reply=(400, "no"))
    code, _, err = run("--max-failed-share", "0.2", "--concurrency", "1")
    assert code == 1
    assert "2 prompts failed, the last one with: 400: no\n2 of 8 prompts are answered" in err
    assert len(server.requests) == 4


def test_a_refusal_of_everything_ends_the_run(run: Run, server: StubServer) -> None:
    server.behaviour = lambda body: (401, "no key")
    code, _, err = run("--concurrency", "1")
    assert code == 1
    assert f"{server.url}/chat/completions answered 401: no key" in err
    assert len(server.requests) == 1


def test_no_server(run: Run, out: Path) -> None:
    code, _, err = run(where=("--url", "http://127.0.0.1:9/v1"))
    assert code == 1
    assert "no server answers at http://127.0.0.1:9/v1: " in err
    assert "the same command goes on from there" in err


def test_a_server_that_goes_away(run: Run, server: StubServer) -> None:
    server.behaviour = lambda body: HANG_UP
    code, _, err = run("--retries", "1")
    assert code == 1
    assert f"the server at {server.url} is gone: " in err
    assert "(2 attempts)" in err


@pytest.mark.parametrize(
    ("models", "options", "code", "said"),
    [
        ((404, "none"), (), 1, "give the URL up to and including /v1"),
        ((200, "<html>"), (), 1, "is not a list of models"),
        ((200, {"data": [{"id": "a"}, {"id": "b"}]}), (), 2, "serves a, b: name one with --model"),
        ((200, {"data": [{"id": "a"}]}), ("--model", "c"), 2, "does not serve 'c', but a"),
    ],
)
def test_what_is_served_has_to_fit(
    run: Run, server: StubServer, models: Reply, options: tuple[str, ...], code: int, said: str
) -> None:
    server.models = models
    found, _, err = run(*options)
    assert found == code
    assert said in err
    assert not server.requests


def test_other_settings_or_prompts_are_refused(
    run: Run, server: StubServer, prompts: Path, out: Path
) -> None:
    run("--num", "2")
    before = out.read_bytes()
    code, _, err = run("--max-tokens", "99")
    assert (code, "max_tokens: recorded 256, now 99" in err) == (2, True)
    server.models = (200, {"data": [{"id": "other"}]})
    code, _, err = run()
    assert (code, 'model: recorded "stub", now "other"' in err) == (2, True)
    prompts.write_text(prompts.read_text() + '{"prompt": "more"}\n')
    code, _, err = run()
    assert (code, "prompts_sha256: recorded " in err) == (2, True)
    out.with_suffix(".meta.json").unlink()
    code, _, err = run()
    assert (code, "answers.meta.json, which says how they were" in err) == (
        2,
        True,
    )
    assert out.read_bytes() == before


def test_bad_lines_are_skipped_and_named(run: Run, prompts: Path, out: Path) -> None:
    prompts.write_text('{"prompt": "a"}\n{\n\n{"prompt": ""}\n{"prompt": "b"}\n')
    code, said, err = run("--max-bad-share", "0.5", "--format", "json")
    assert code == 0
    assert err == "skipped, no prompts: lines 2, 4\n"
    assert json.loads(said)["skipped_lines"] == [2, 4]
    assert lines(out) == [1, 5]


def test_too_many_bad_lines_are_refused(run: Run, prompts: Path, out: Path) -> None:
    prompts.write_text('{"prompt": "a"}\n' + "{\n" * 12)
    code, _, err = run()
    assert code == 2
    assert f"{prompts}:2: expected an object" in err
    assert "and 2 more\n92.31% of the lines are no prompts; --max-bad-share is 0.01" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--url", "http://a/v1", "--pipeline", "x.yaml"), "give either --url or --pipeline"),
        (("--url", "ftp://a/v1"), "expected http://HOST:PORT/v1"),
        (("--url", "http:///v1"), "expected http://HOST:PORT/v1"),
        (("--url", "http://a/v1", "--set", "a=1"), "--set changes a pipeline"),
        (("--url", "http://a/v1", "--extra-body", "["), "not JSON"),
        (("--url", "http://a/v1", "--extra-body", "[]"), "expected an object, found []"),
        (("--url", "http://a/v1", "--extra-body", '{"n": 2}'), "n: set by this command itself"),
    ],
)
def test_a_wrong_command_line(run: Run, options: tuple[str, ...], said: str) -> None:
    code, _, err = run(where=options)
    assert code == 2
    assert said in err


def test_the_prompts_are_not_written_over(run: Run, prompts: Path, out: Path) -> None:
    out.write_bytes(prompts.read_bytes())
    prompts.unlink()
    prompts.symlink_to(out)
    code, _, err = run()
    assert (code, "would be written over" in err) == (2, True)


def test_a_second_process_is_refused(run: Run, out: Path) -> None:
    with writing(out):
        code, _, err = run()
    assert code == 1
    assert f"{out} is being written to by process {os.getpid()}" in err


def test_a_full_disk_keeps_what_is_written(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if data.startswith(b'{"line":3'):
            return write(descriptor, data[:10])
        if b'"id":"p3"' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    code, _, err = run("--concurrency", "1")
    assert code == 1
    assert f"cannot write {out}: disk full (No space left on device)\n2 of 8 prompts" in err
    assert out.read_bytes().endswith(b"\n")
    monkeypatch.setattr(os, "write", write)
    assert run()[0] == 0
    assert lines(out) == list(range(1, 9))


def test_a_key_is_sent_and_not_recorded(run: Run, server: StubServer, out: Path) -> None:
    assert run("--api-key", "s3cret")[0] == 0
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in out.with_suffix(".meta.json").read_text()


def test_answers_without_ids_are_counted(run: Run) -> None:
    code, said, _ = run("--no-token-ids")
    assert code == 0
    assert "8 answers came without token ids" in said


def test_a_pipeline_is_served_meanwhile(
    run: Run, server: StubServer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    @contextmanager
    def start(pipeline: Path, overrides: tuple[str, ...]) -> Iterator[str]:
        seen.append((pipeline, overrides))
        yield server.url.removesuffix("/v1")
        seen.append("stopped")

    monkeypatch.setattr(regenerate_job, "load", lambda target, **_: start)
    code, _, err = run(where=("--pipeline", "x.yaml", "--set", "a=1"))
    assert (code, err) == (0, "starting a server of x.yaml\n")
    assert seen == [(Path("x.yaml"), ("a=1",)), "stopped"]
    assert lines(out) == list(range(1, 9))


def test_the_examples_of_the_help_are_accepted(prompts: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(prompts.parent)
    command = draft.commands["regenerate"]
    text = re.sub(r"\n +--", " --", command.help or "")
    examples = re.findall(r"^ *specstack draft regenerate (.+)$", text, re.M)
    assert len(examples) == 3
    for example in examples:
        command.make_context("regenerate", example.split())
