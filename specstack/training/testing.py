"""An OpenAI-compatible server without a model, in this process: for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "stub"
Reply = tuple[int, Any]
HANG_UP: Reply = (0, None)
"""Close the connection without a reply."""
Behaviour = Callable[[dict[str, Any]], Reply]


def completion(body: dict[str, Any], *, finish_reason: str = "stop") -> Reply:
    """Answer with the prompt in capitals, three tokens, and their ids if they are asked for."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": body["messages"][-1]["content"].upper()},
        "finish_reason": finish_reason,
    }
    if body.get("return_token_ids"):
        choice |= {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4, 5]}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


class StubServer:
    """What a test sets and sees of the server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.models: Reply = (200, {"data": [{"id": MODEL}]})
        self.behaviour: Behaviour = completion
        """From the body of a request to status and reply; called in a thread per connection."""
        self.requests: list[dict[str, Any]] = []
        """Every body, in the order of arrival."""
        self.headers: list[dict[str, str]] = []
        """The headers of each."""


@contextmanager
def stub_server() -> Iterator[StubServer]:
    """Serve on a free port for the length of a block."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.stub = StubServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True
    block_on_close = False
    stub: StubServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        found = self.server.stub.models if self.path == "/v1/models" else (404, "not here")
        self._reply(*found)

    def do_POST(self) -> None:
        stub = self.server.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub.requests.append(body)
        stub.headers.append(dict(self.headers))
        self._reply(*stub.behaviour(body))

    def _reply(self, status: int, reply: Any) -> None:
        if (status, reply) == HANG_UP:
            self.close_connection = True
            return
        content = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:
            self.close_connection = True  # the client was killed, which is what a test is about

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
