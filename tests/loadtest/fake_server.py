"""A server with no model that answers by a script, in a process of its own, and notes the truth.

Every chunk has an absolute deadline, so that delays do not add up. The log holds when requests came
and when chunks were written, on the clock that all processes of a machine share (`time.monotonic`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

MODEL = "fake-model"
NUM_CORRECT_DRAFTS, HISTOGRAM = 7, (1, 2, 3)


@dataclass(frozen=True)
class Script:
    """How it answers. Lists are gone through again and again, by the number of the request."""

    first_s: tuple[float, ...] = (0.05,)
    """From a request to its first chunk."""
    gap_s: tuple[float, ...] = (0.01,)
    """Between its chunks."""
    tokens: tuple[int, ...] = (1,)
    """Of each chunk, by its place, until there are max_tokens."""
    stall_s: tuple[float, float] | None = None
    """Nothing is written between these times since the first request."""
    dies_at_s: float | None = None
    """When the process ends, since the first request."""
    faults: dict[str, str] = field(default_factory=dict)
    """What goes wrong, by the number of the request; `*` for all: http_CODE, disconnect,
    server_error, bad_json, no_text, abort, hang, no_done."""
    text: str | None = None
    """Of every answer, in its first chunk."""
    not_ready: int = 0
    """How often /v1/models says 503 first."""
    owned_by: str = "sglang"
    has_metrics: bool = True
    page_faults: dict[str, str] = field(default_factory=dict)
    """What /metrics says instead, by the number of the question; `*` for all: http_CODE,
    bad_page."""
    flush_codes: tuple[int, ...] = (200,)
    """What /flush_cache answers, the last one for good; it is SGLang's alone."""
    key: str | None = None
    """Without which /flush_cache answers 401."""

    def delays(self, number: int) -> tuple[float, float]:
        """(to the first chunk, between chunks) of a request."""
        return self.first_s[number % len(self.first_s)], self.gap_s[number % len(self.gap_s)]


class Log:
    """What a server noted."""

    def __init__(self, path: Path) -> None:
        self._lines = [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def requests(self) -> list[dict[str, Any]]:
        """number, body, headers, at; in the order in which they came."""
        return [line for line in self._lines if "body" in line]

    @property
    def flushes(self) -> list[dict[str, Any]]:
        """code, method, at; of every question to empty the cache."""
        return [line for line in self._lines if "code" in line]

    @property
    def chunks(self) -> dict[int, list[float]]:
        """When each chunk was written, by the number of the request."""
        found: dict[int, list[float]] = defaultdict(list)
        for line in self._lines:
            if "chunk" in line:
                found[line["number"]].append(line["at"])
        return found

    def by_seed(self) -> dict[int, dict[str, Any]]:
        """Requests by their seed, which tells conversations apart."""
        found = {line["body"]["seed"]: line for line in self.requests}
        assert len(found) == len(self.requests), "a seed came twice"
        return found


@dataclass
class FakeServer:
    """A running one."""

    url: str
    process: subprocess.Popen[str]
    log_path: Path

    @property
    def log(self) -> Log:
        """What it noted so far."""
        return Log(self.log_path)


@contextmanager
def running_server(script: Script, folder: Path) -> Iterator[FakeServer]:
    """Run a server for the length of a block."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.jsonl"
    command = [sys.executable, __file__, json.dumps(asdict(script)), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield FakeServer(f"http://127.0.0.1:{int(process.stdout.readline())}", process, log)
        finally:
            process.kill()


class _Service:
    """The server's side."""

    def __init__(self, script: Script, log: TextIO) -> None:
        self.script = script
        self.log = log
        self.first_request: float | None = None
        self.num_requests = 0
        self.num_tokens = 0
        self.num_asked_ready = 0
        self.num_asked_metrics = 0
        self.num_asked_flush = 0

    def note(self, **line: Any) -> None:
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, one after the other."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                at = time.monotonic()
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split()[1]
                if path == "/v1/chat/completions":
                    if not await self.chat(json.loads(body), headers, at, writer):
                        break
                elif path == "/flush_cache" and self.script.owned_by == "sglang":
                    code = self.flush(headers)
                    self.note(code=code, method=first.split()[0], at=at)
                    _respond(writer, code, "text/plain", "")
                else:
                    code, kind, text = self.page(path)
                    _respond(writer, code, kind, text)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def flush(self, headers: dict[str, str]) -> int:
        """The answer to the question to empty the cache."""
        key, codes = self.script.key, self.script.flush_codes
        if key is not None and headers.get("authorization") != f"Bearer {key}":
            return 401
        number, self.num_asked_flush = self.num_asked_flush, self.num_asked_flush + 1
        return codes[min(number, len(codes) - 1)]

    def page(self, path: str) -> tuple[int, str, str]:
        """Everything but answers."""
        if path == "/v1/models":
            self.num_asked_ready += 1
            if self.num_asked_ready <= self.script.not_ready:
                return 503, "text/plain", "starting"
            models = [{"id": MODEL, "owned_by": self.script.owned_by}]
            return 200, "application/json", json.dumps({"data": models})
        if path == "/metrics" and self.script.has_metrics:
            faults, number = self.script.page_faults, self.num_asked_metrics
            self.num_asked_metrics += 1
            fault = faults.get(str(number)) or faults.get("*")
            if fault is not None:
                code = int(fault[5:]) if fault.startswith("http_") else 200
                return code, "text/plain", "specstack_x nonsense"
            return (
                200,
                "text/plain",
                METRICS.format(tokens=self.num_tokens, requests=self.num_requests),
            )
        if path == "/server_info" and self.script.owned_by == "sglang":
            state = {"effective_max_running_requests_per_dp": 16, "specstack": {"plan_hash": "abc"}}
            info = {"version": "0.0", "dtype": "float32", "internal_states": [state]}
            return 200, "application/json", json.dumps({**info, "max_total_num_tokens": 4096})
        return 404, "text/plain", "not here"

    async def chat(
        self, body: dict[str, Any], headers: dict[str, str], at: float, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer; returns whether the connection goes on."""
        number, self.num_requests = self.num_requests, self.num_requests + 1
        if self.first_request is None:
            self.first_request = at
            if self.script.dies_at_s is not None:
                asyncio.get_running_loop().call_later(self.script.dies_at_s, os._exit, 1)
        self.note(number=number, body=body, headers=headers, at=at)
        fault = self.script.faults.get(str(number)) or self.script.faults.get("*") or ""
        first_s, gap_s = self.script.delays(number)
        if fault.startswith("http_"):
            await self.until(at + first_s)
            _respond(writer, int(fault[5:]), "text/plain", "refused by the script")
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        _send(writer, _event({"role": "assistant", "content": ""}))
        done = 0
        if fault != "no_text":
            for place, done in enumerate(self.amounts(body["max_tokens"])):
                if fault in ENDS_AFTER and place == ENDS_AFTER[fault]:
                    return await self.fail(fault, writer)
                await self.until(at + first_s + place * gap_s)
                text = self.script.text or f"w{place} "
                text = text if place == 0 or self.script.text is None else " "
                self.num_tokens += done
                self.note(number=number, chunk=place, at=time.monotonic())
                _send(writer, _event({"content": text}, usage=_usage(body, done)))
        _send(writer, _event({}, finish="abort" if fault == "abort" else "stop"))
        _send(writer, {"choices": [], "sglext": {"spec_tokens_details": DETAILS}})
        _send(writer, {"choices": [], "usage": _usage(body, done)})
        if fault != "no_done":
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def amounts(self, max_tokens: int) -> Iterator[int]:
        """Tokens so far after each chunk."""
        done = place = 0
        while done < max_tokens:
            done = min(max_tokens, done + self.script.tokens[place % len(self.script.tokens)])
            place += 1
            yield done

    async def fail(self, fault: str, writer: asyncio.StreamWriter) -> bool:
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "bad_json":
            _chunk(writer, b"data: {oops\n\n")
        if fault == "server_error":
            _send(writer, {"error": {"message": "out of everything", "code": 500}})
            _chunk(writer, b"data: [DONE]\n\n")
        await writer.drain()
        return False

    async def until(self, time_at: float) -> None:
        """Return at that time, or when a stall ends in which it lies."""
        assert self.first_request is not None
        if self.script.stall_s is not None:
            begins, ends = (self.first_request + t for t in self.script.stall_s)
            time_at = ends if begins <= time_at < ends else time_at
        while (left := time_at - time.monotonic()) > 0:
            await asyncio.sleep(left)


ENDS_AFTER = {"disconnect": 2, "server_error": 2, "bad_json": 1, "hang": 1}
"""Chunks before a fault."""
DETAILS = {
    "spec_num_correct_drafts": NUM_CORRECT_DRAFTS,
    "spec_num_proposed_drafts": 20,
    "spec_verify_ct": 6,
    "spec_correct_drafts_histogram": HISTOGRAM,
}
METRICS = """# HELP sglang:generation_tokens_total Tokens.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{model_name="fake"}} {tokens}
# HELP sglang:num_running_reqs Running.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{model_name="fake"}} 1
# HELP sglang:http_requests_total Of no interest.
# TYPE sglang:http_requests_total counter
sglang:http_requests_total 9
# HELP specstack_draft_budget Budget.
# TYPE specstack_draft_budget gauge
specstack_draft_budget{{model_name="fake"}} 4
# HELP mine_rounds_total Rounds.
# TYPE mine_rounds_total counter
mine_rounds_total{{draft_budget="4",reason="say \\"so\\""}} {requests}
# HELP sglang:e2e_seconds Took.
# TYPE sglang:e2e_seconds histogram
sglang:e2e_seconds_bucket{{le="1"}} 1
sglang:e2e_seconds_bucket{{le="+Inf"}} 1
sglang:e2e_seconds_sum 1
sglang:e2e_seconds_count 1
# HELP python_gc_total Of no interest.
# TYPE python_gc_total counter
python_gc_total 3
"""


def _usage(body: dict[str, Any], done: int) -> dict[str, Any]:
    return {
        "prompt_tokens": len(json.dumps(body["messages"])) // 4,
        "completion_tokens": done,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def _event(
    delta: dict[str, Any], finish: str | None = None, usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


def _send(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(event)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _respond(writer: asyncio.StreamWriter, code: int, kind: str, text: str) -> None:
    body = text.encode()
    head = f"HTTP/1.1 {code} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def _main(script: Script, log: Path) -> None:
    with log.open("w") as file:
        service = _Service(script, file)
        server = await asyncio.start_server(service.serve, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(Script(**json.loads(sys.argv[1])), Path(sys.argv[2])))
