"""Sends one turn, reads its stream, and says what came back when.

The time of a chunk is the moment at which the bytes that complete its line were read. Nothing that
a server does is raised: it is the `error` of a record, which keeps what arrived before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx

from specstack_loadtest.records import CANCELLED, RequestRecord
from specstack_loadtest.server import Dialect, Served, authorization, base_url
from specstack_loadtest.workload import Turn

Messages = Sequence[dict[str, str]]
TimeLimit = Callable[[float], AbstractContextManager[Any]]
"""(seconds) -> context that raises httpx.ReadTimeout in its block when they are over."""

MAX_DETAIL = 200
CONNECT_S = 10.0
KEEP_ALIVE_S = 2.0
"""Below the 5 s after which uvicorn closes an idle connection: none is used as it is closed."""


@dataclass(frozen=True)
class Errand:
    """Which turn is sent, by whom, and when it was due."""

    phase: int
    index: int
    turn: int
    worker: int
    warmup: bool
    due_s: float


@dataclass(frozen=True)
class Answer:
    """What became of a turn."""

    record: RequestRecord
    content: str
    """The assistant's message, for the history; without its reasoning."""


class ChatClient:
    """Connections to one server."""

    def __init__(
        self,
        url: str,
        served: Served,
        timeout_s: float,
        *,
        now: Callable[[], float],
        opt_out: bool = False,
        time_limit: TimeLimit | None = None,
        interruption: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        """Nothing is sent yet.

        Args:
            timeout_s: of a whole request.
            now: seconds since the run's epoch.
            opt_out: ask not to speculate.
            time_limit: ends a silent stream in time; without it, that takes `timeout_s` from the
                last chunk.
            interruption: what ends a request from outside; it makes a record, and is not raised.

        Raises:
            OptOutUnknown: the server has none.
        """
        if opt_out:
            served.require_opt_out()
        self._url = f"{base_url(url)}/v1/chat/completions"
        self._fields = {"model": served.model, **_fields_of(served.dialect, opt_out)}
        self._knows_ignore_eos = served.dialect != "other"
        self._timeout_s = timeout_s
        self._now = now
        self._time_limit: TimeLimit = time_limit or (lambda seconds: nullcontext())
        self._interruption = interruption
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S
            ),
            headers={"Accept-Encoding": "identity", **authorization()},
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def stream(self, turn: Turn, history: Messages, errand: Errand) -> Answer:
        """Send a turn after the messages of `history`, and read its answer to the end."""
        request = self._http.build_request("POST", self._url, json=self.body(turn, history))
        arrived = Arrived()
        sent_s = self._now()
        error, detail = None, ""
        try:
            with self._time_limit(self._timeout_s):
                self._receive(request, arrived, sent_s + self._timeout_s)
            arrived.check(structured=turn.response_format is not None)
        except Fault as fault:
            error, detail = fault.kind, fault.detail
        except httpx.HTTPError as problem:
            error, detail = _kind(problem), str(problem) or type(problem).__name__
        except self._interruption:
            error, detail = CANCELLED, "the run was stopped"
        end_s = arrived.done_s if error is None and arrived.done_s is not None else self._now()
        record = RequestRecord(
            **vars(errand),
            sent_s=sent_s,
            end_s=end_s,
            error=error,
            detail=detail[:MAX_DETAIL],
            max_tokens=turn.max_tokens,
            temperature=turn.temperature,
            **arrived.fields(),
        )
        return Answer(record, arrived.content)

    def body(self, turn: Turn, history: Messages) -> dict[str, Any]:
        """What is sent."""
        body = {
            **self._fields,
            "messages": [*history, *turn.messages],
            "max_tokens": turn.max_tokens,
            "temperature": turn.temperature,
            "seed": turn.seed,
            "stream": True,
        }
        if turn.response_format is not None:
            body["response_format"] = turn.response_format
        if turn.exact_output and self._knows_ignore_eos:
            body["ignore_eos"] = True
        return body

    def _receive(self, request: httpx.Request, arrived: Arrived, deadline_s: float) -> None:
        response = self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                text = response.read().decode("utf-8", "replace")
                raise Fault(f"http_{response.status_code}", text.strip())
            for at_s, line in lines_of(response.iter_bytes(), self._now):
                if at_s > deadline_s and not arrived.is_done:
                    raise httpx.ReadTimeout(f"no end after {self._timeout_s:g} s")
                arrived.take(line, at_s)
        except httpx.HTTPError:
            if not arrived.is_done:  # else the answer is whole, and only the connection ended badly
                raise
        finally:
            response.close()


def lines_of(parts: Iterable[bytes], now: Callable[[], float]) -> Iterator[tuple[float, bytes]]:
    """(when the end of a line was read, the line), of a stream that comes in any parts."""
    rest = b""
    for part in parts:
        at_s = now()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield at_s, line
    if rest:
        yield now(), rest


class Fault(Exception):
    """A server answered something else than an answer."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass
class Arrived:
    """What has come of one answer so far."""

    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int | None] = field(default_factory=list)
    done_s: float | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)
    _text: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether the server said that this is all."""
        return self.done_s is not None

    @property
    def content(self) -> str:
        """The message so far."""
        return "".join(self._content)

    def take(self, line: bytes, at_s: float) -> None:
        """Take in a line of the stream.

        Raises:
            Fault: it carries an error, or cannot be read.
        """
        if not line.startswith(b"data:"):
            return  # between events, a comment, the name of an event
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            self.done_s = at_s
            return
        try:
            event = json.loads(data)
            if problem := event.get("error"):
                words = problem.get("message") if isinstance(problem, dict) else None
                raise Fault("server_error", str(words or problem))
            self._take_event(event, at_s)
        except (ValueError, AttributeError, TypeError, LookupError) as error:
            text = data.decode("utf-8", "replace")
            raise Fault("bad_json", f"{error!r} in {text}") from None

    def _take_event(self, event: dict[str, Any], at_s: float) -> None:
        usage = event.get("usage") or {}
        self.usage.update({key: value for key, value in usage.items() if value is not None})
        self.drafts.update((event.get("sglext") or {}).get("spec_tokens_details") or {})
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            content = delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            calls = json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else ""
            if text := thought + content + calls:
                self._text.append(text)
                self._content.append(content)
                self.chunk_s.append(at_s)
                self.chunk_tokens.append(usage.get("completion_tokens"))

    def check(self, *, structured: bool) -> None:
        """Look at the whole stream, which has ended.

        Raises:
            Fault: it is no whole answer, or not of the structure that was asked for.
        """
        if self.finish_reason == "abort":
            raise Fault("server_error", "the server aborted the request")
        if not self.is_done and self.finish_reason is None:
            raise Fault("disconnect", "the stream ended before the answer")
        if not self.chunk_s:
            raise Fault("no_text", f"an answer without text, finish_reason {self.finish_reason}")
        if structured and self.finish_reason == "stop":
            try:
                json.loads(self.content)
            except ValueError as error:
                raise Fault("invalid_structure", f"{error} in {self.content}") from None

    def fields(self) -> dict[str, Any]:
        """Those of a record that come from the stream."""
        counts = [tokens for tokens in self.chunk_tokens if tokens is not None]
        drafts = self.drafts
        return {
            "chunk_s": tuple(self.chunk_s),
            "chunk_tokens": tuple(counts) if len(counts) == len(self.chunk_s) else (),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "cached_tokens": (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "output_tokens": self.usage.get("completion_tokens"),
            "text_sha256": hashlib.sha256("".join(self._text).encode()).hexdigest(),
            "num_correct_drafts": drafts.get("spec_num_correct_drafts"),
            "num_proposed_drafts": drafts.get("spec_num_proposed_drafts"),
            "num_rounds": drafts.get("spec_verify_ct"),
            "correct_drafts_histogram": tuple(drafts.get("spec_correct_drafts_histogram") or ()),
        }


def _fields_of(dialect: Dialect, opt_out: bool) -> dict[str, Any]:
    """Extensions of the API that make servers say more."""
    usage: dict[str, Any] = {"include_usage": True}
    fields: dict[str, Any] = {"stream_options": usage}
    if dialect in ("sglang", "vllm"):
        usage["continuous_usage_stats"] = True
    if dialect == "sglang":
        fields["return_spec_tokens_details"] = True
        if opt_out:
            fields["custom_params"] = {"specstack": {"speculate": False}}
    return fields


def _kind(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "connect"
    return "timeout" if isinstance(error, httpx.TimeoutException) else "disconnect"
