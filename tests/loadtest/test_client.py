"""The client against a server that answers by a script: times, contents, errors."""

from __future__ import annotations

import hashlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import HISTOGRAM, MODEL, NUM_CORRECT_DRAFTS, Script, running_server
from small_scenarios import turn

from specstack_loadtest.client import Answer, ChatClient, Errand, lines_of
from specstack_loadtest.records import read_records
from specstack_loadtest.server import Dialect, OptOutUnknown, Served

TICK_S, WORST_S = 0.010, 0.050
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def client_of(url: str, dialect: Dialect = "sglang", **options: Any) -> ChatClient:
    return ChatClient(
        url, Served(MODEL, dialect), options.pop("timeout_s", 20.0), now=time.monotonic, **options
    )


def ask(client: ChatClient, index: int = 0, **changes: Any) -> Answer:
    errand = Errand(0, index, 0, worker=0, warmup=False, due_s=time.monotonic())
    return client.stream(turn(seed=index, **changes), [], errand)


def assert_close(found: list[float], late: float = WORST_S) -> None:
    """Delays of the client alone: never before the server wrote, rarely much later."""
    delays = np.array(found)
    assert delays.min() > -0.001
    assert np.median(delays) < TICK_S
    assert np.percentile(delays, 95) < late


@pytest.mark.timing
def test_times_are_those_at_which_the_server_wrote(tmp_path: Path) -> None:
    script = Script(first_s=(0.1, 0.2, 0.05), gap_s=(0.02, 0.035))
    with running_server(script, tmp_path) as server:
        client = client_of(server.url)
        with ThreadPoolExecutor(6) as pool:
            asked = list(pool.map(lambda n: ask(client, n, max_tokens=15), range(6)))
        log = server.log
    came, chunks = log.by_seed(), log.chunks
    reading, sending = [], []
    for answer in asked:
        record, request = answer.record, came[answer.record.index]
        written = chunks[request["number"]]
        assert len(record.chunk_s) == len(written) == 15
        reading += [at - then for at, then in zip(record.chunk_s, written, strict=True)]
        sending.append(request["at"] - record.sent_s)
        reading.append(record.end_s - written[-1])
        first_s, gap_s = script.delays(request["number"])
        assert record.chunk_s[0] - record.sent_s == pytest.approx(first_s, abs=0.1)
        assert np.diff(record.chunk_s).mean() == pytest.approx(gap_s, abs=0.01)
    assert_close(reading)
    assert_close(sending)


def test_a_record_has_what_the_server_says(tmp_path: Path) -> None:
    with running_server(Script(tokens=(3, 1)), tmp_path) as server:
        answer = ask(client_of(server.url), max_tokens=6)
    record = answer.record
    assert record.error is None
    assert record.detail == ""
    assert record.chunk_tokens == (3, 4, 6)
    assert record.output_tokens == record.max_tokens == 6
    assert record.cached_tokens == 3
    assert record.prompt_tokens
    assert record.finish_reason == "stop"
    assert answer.content == "w0 w1 w2 "
    assert record.text_sha256 == hashlib.sha256(b"w0 w1 w2 ").hexdigest()
    assert record.num_correct_drafts == NUM_CORRECT_DRAFTS
    assert record.num_rounds == 6
    assert record.correct_drafts_histogram == HISTOGRAM


@pytest.mark.parametrize(
    ("fault", "error", "detail", "num_chunks"),
    [
        ("http_429", "http_429", "refused by the script", 0),
        ("http_503", "http_503", "refused by the script", 0),
        ("disconnect", "disconnect", "", 2),
        ("server_error", "server_error", "out of everything", 2),
        ("bad_json", "bad_json", "oops", 1),
        ("no_text", "no_text", "stop", 0),
        ("abort", "server_error", "aborted", 6),
        ("hang", "timeout", "", 1),
    ],
)
def test_an_error_is_recorded_with_what_came_before(
    tmp_path: Path, fault: str, error: str, detail: str, num_chunks: int
) -> None:
    with running_server(Script(faults={"*": fault}), tmp_path) as server:
        record = ask(client_of(server.url, timeout_s=1.0)).record
    assert record.error == error
    assert detail in record.detail
    assert record.detail
    assert len(record.chunk_s) == len(record.chunk_tokens) == num_chunks
    assert record.end_s >= max(record.chunk_s, default=record.sent_s)
    assert record.end_s - record.sent_s < 3.0


def test_an_answer_without_done_is_whole(tmp_path: Path) -> None:
    with running_server(Script(faults={"*": "no_done"}), tmp_path) as server:
        assert ask(client_of(server.url)).record.error is None


def test_nobody_there_is_an_error_of_its_own() -> None:
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        record = ask(client_of(f"http://127.0.0.1:{held.getsockname()[1]}")).record
    assert record.error == "connect"
    assert record.chunk_s == ()
    assert record.sent_s >= record.due_s


def test_an_answer_that_trickles_on_ends_at_the_timeout(tmp_path: Path) -> None:
    with running_server(Script(gap_s=(0.1,)), tmp_path) as server:
        record = ask(client_of(server.url, timeout_s=0.75), max_tokens=100).record
    assert record.error == "timeout"
    assert record.end_s - record.sent_s == pytest.approx(0.8, abs=0.25)
    assert 4 <= len(record.chunk_s) <= 8


@pytest.mark.parametrize(
    ("text", "error"),
    [('{"answer": 4}', None), ("four", "invalid_structure"), ('{"answer": ', "invalid_structure")],
)
def test_a_structured_answer_has_to_parse(tmp_path: Path, text: str, error: str | None) -> None:
    with running_server(Script(text=text), tmp_path) as server:
        client = client_of(server.url)
        assert ask(client, response_format=FORMAT).record.error == error
        assert ask(client, 1).record.error is None
        assert server.log.requests[0]["body"]["response_format"] == FORMAT
        assert "response_format" not in server.log.requests[1]["body"]


def test_each_dialect_is_asked_for_what_it_knows() -> None:
    served = {"messages": [{"role": "user", "content": "What is 2 times 2?"}], "model": MODEL}
    asked = {"max_tokens": 6, "temperature": 0.0, "seed": 1, "stream": True}
    plain = {**served, **asked, "stream_options": {"include_usage": True}}
    told = {"include_usage": True, "continuous_usage_stats": True}
    exact = turn(exact_output=True)
    address = "http://127.0.0.1:1"
    assert client_of(address, "other").body(exact, []) == plain
    assert client_of(address, "llamacpp").body(exact, []) == {**plain, "ignore_eos": True}
    vllm = {**plain, "stream_options": told}
    assert client_of(address, "vllm").body(turn(), []) == vllm
    sglang = {**vllm, "return_spec_tokens_details": True}
    assert client_of(address).body(turn(), []) == sglang
    without = {**sglang, "custom_params": {"specstack": {"speculate": False}}}
    assert client_of(address, opt_out=True).body(turn(), []) == without


def test_opting_out_needs_a_server_that_knows_it() -> None:
    with pytest.raises(OptOutUnknown, match="only those of specstack have"):
        client_of("http://127.0.0.1:1", "vllm", opt_out=True)


def test_history_comes_before_the_turn(tmp_path: Path) -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with running_server(Script(), tmp_path) as server:
        errand = Errand(0, 0, 1, worker=0, warmup=False, due_s=0.0)
        client_of(server.url).stream(turn(), history, errand)
        messages = server.log.requests[0]["body"]["messages"]
    assert messages == [*history, *turn().messages]


def test_the_key_is_sent_and_proxies_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with running_server(Script(), tmp_path) as server:
        assert ask(client_of(server.url)).record.error is None
        assert server.log.requests[0]["headers"]["authorization"] == "Bearer secret"


class Stopped(BaseException):
    """What ends a request from outside."""


def test_a_request_that_is_given_up_leaves_a_record(tmp_path: Path) -> None:
    """Here by the clock, which a client reads between chunks."""
    ticks = iter([0.0, 1.0, 2.0])  # due is not read

    def now() -> float:
        for time_s in ticks:
            return time_s
        ended.append(True)
        if len(ended) == 1:
            raise Stopped
        return 9.0

    ended: list[bool] = []
    with running_server(Script(), tmp_path) as server:
        client = ChatClient(
            server.url, Served(MODEL, "sglang"), 20.0, now=now, interruption=Stopped
        )
        record = client.stream(turn(), [], Errand(0, 0, 0, 0, False, due_s=0.0)).record
    assert (record.error, record.sent_s, record.end_s) == ("cancelled", 0.0, 9.0)


def test_a_line_has_the_time_of_its_last_part() -> None:
    times = iter(range(10))
    parts = [b"data: \xc3", b"\xa4\n\nda", b"ta: b\nrest"]
    found = list(lines_of(parts, lambda: float(next(times))))
    assert found == [(1.0, b"data: \xc3\xa4"), (1.0, b""), (2.0, b"data: b"), (3.0, b"rest")]


def test_a_record_survives_its_line(tmp_path: Path) -> None:
    with running_server(Script(), tmp_path) as server:
        record = ask(client_of(server.url)).record
    path = tmp_path / "requests.jsonl"
    path.write_text(record.as_line() + "\n")
    (again,) = read_records(path)
    assert again.as_line() == record.as_line()
    assert replace(again, due_s=0.0, sent_s=0.0, end_s=0.0, chunk_s=()) == replace(
        record, due_s=0.0, sent_s=0.0, end_s=0.0, chunk_s=()
    )
