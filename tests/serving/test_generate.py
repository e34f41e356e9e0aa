"""A client that keeps as many requests in flight as asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from specstack.processes import free_port
from specstack_serving.generate import RequestRefused, generate


class Stub:
    """Answers /generate once `together` requests are in flight, echoing the input."""

    def __init__(self, port: int, together: int) -> None:
        self._port, self._together = port, together
        self.most_in_flight = self._in_flight = 0

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        self._enough = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", self._port)
        ready.set()
        await stop.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            if self._in_flight == self._together:
                self._enough.set()
            await asyncio.wait_for(self._enough.wait(), 5)
            self._in_flight -= 1
            status, text = b"200 OK", json.dumps({"output_ids": body["input_ids"], "meta_info": {}})
            if body["input_ids"] == [13]:
                status, text = b"400 Bad Request", "unlucky"
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(text)))
            writer.write(text.encode())
            await writer.drain()
            if reader.at_eof():
                return


@pytest.fixture
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    made = Stub(free_port(), request.param)
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        loop.run_until_complete(made.serve(ready, stop))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(5)
    yield made
    loop.call_soon_threadsafe(stop.set)
    thread.join(5)


def ask(stub: Stub, inputs: list[list[int]], concurrency: int) -> list[tuple[int, ...]]:
    url = f"http://127.0.0.1:{stub._port}"
    return [g.output_ids for g in generate(url, inputs, {}, concurrency=concurrency)]


@pytest.mark.parametrize("stub", [150], indirect=True)
def test_as_many_requests_as_asked_are_in_flight(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the 100 of httpx, and past any proxy of the environment."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    inputs = [[i + 1000] for i in range(160)]
    assert ask(stub, inputs, 150) == [tuple(ids) for ids in inputs]
    assert stub.most_in_flight == 150


@pytest.mark.parametrize("stub", [1], indirect=True)
def test_a_refused_request_raises_with_the_servers_words(stub: Stub) -> None:
    with pytest.raises(RequestRefused, match="400: unlucky"):
        ask(stub, [[1], [13], [2]], 1)
    assert stub.most_in_flight == 1


def test_a_server_that_is_gone_is_a_transport_error() -> None:
    with pytest.raises(httpx.TransportError):
        generate(f"http://127.0.0.1:{free_port()}", [[1]], {}, concurrency=1)
