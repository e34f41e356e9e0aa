"""Which servers may be loaded, and how they are asked what they are."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from fake_server import MODEL, Script, running_server

from specstack_loadtest.server import (
    RemoteRefused,
    Served,
    ServerUnusable,
    base_url,
    check_address,
    flush_cache,
    identify,
)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:30000", "http://localhost:1", "https://[::1]:2/v1", "http://127.1.2.3"],
)
def test_this_machine_may_be_loaded(url: str) -> None:
    check_address(url, allow_remote=False)


@pytest.mark.parametrize("url", ["http://10.0.0.5:8000", "https://example.com", "http://[2001::1]"])
def test_another_machine_only_if_that_is_allowed(url: str) -> None:
    with pytest.raises(RemoteRefused, match=r"is not on this machine.*--allow-remote"):
        check_address(url, allow_remote=False)
    check_address(url, allow_remote=True)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://127.0.0.1", "http://", "http://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ServerUnusable, match="is no URL"):
        check_address(url, allow_remote=True)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_in_v1(end: str) -> None:
    assert base_url(f"http://127.0.0.1:1{end}") == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("owner", "dialect"),
    [("sglang", "sglang"), ("vllm", "vllm"), ("llamacpp", "llamacpp"), ("organization", "other")],
)
def test_a_server_says_what_it_is(tmp_path: Path, owner: str, dialect: str) -> None:
    with running_server(Script(owned_by=owner), tmp_path) as server:
        served = identify(server.url)
        assert (served.model, served.dialect) == (MODEL, dialect)
        assert identify(server.url, MODEL) == served


def test_a_server_that_starts_is_waited_for(tmp_path: Path) -> None:
    with running_server(Script(not_ready=2), tmp_path) as server:
        assert identify(server.url) == Served(MODEL, "sglang")


def test_a_server_that_never_is_ready_is_given_up(tmp_path: Path) -> None:
    with (
        running_server(Script(not_ready=99), tmp_path) as server,
        pytest.raises(ServerUnusable, match="/v1/models answered 503: starting"),
    ):
        identify(server.url, patience_s=0.6)


def test_another_model_is_refused(tmp_path: Path) -> None:
    with (
        running_server(Script(), tmp_path) as server,
        pytest.raises(ServerUnusable, match=f"does not serve 'other', but {MODEL}"),
    ):
        identify(server.url, "other")


def test_nobody_there_is_said() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ServerUnusable, match=f"no server answers at {url}"):
            identify(url)


@pytest.mark.parametrize(
    ("codes", "flushed"), [((200,), True), ((400, 400, 200), True), ((400,), False)]
)
def test_a_cache_that_is_in_use_is_emptied_when_it_is_free(
    tmp_path: Path, codes: tuple[int, ...], flushed: bool
) -> None:
    with running_server(Script(flush_codes=codes), tmp_path) as server:
        began = time.monotonic()
        assert flush_cache(server.url + "/v1", "sglang", patience_s=1.2) is flushed
        assert time.monotonic() - began < 5.0, "not for ever"
        asked = server.log.flushes
    assert {one["method"] for one in asked} == {"POST"}
    assert [one["code"] for one in asked][: len(codes)] == list(codes)
    assert len(asked) == len(codes) if flushed else len(asked) > 1


@pytest.mark.parametrize("code", [403, 404, 500])
def test_a_server_that_does_not_empty_its_cache_is_not_asked_again(
    tmp_path: Path, code: int
) -> None:
    with running_server(Script(flush_codes=(code, 200)), tmp_path) as server:
        assert not flush_cache(server.url, "sglang")
        assert len(server.log.flushes) == 1
        gone = server.url
    assert not flush_cache(gone, "sglang")


def test_a_cache_is_emptied_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(Script(key="mine"), tmp_path) as server:
        for key, flushed in (("mine", True), ("another", False)):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            assert flush_cache(server.url, "sglang") is flushed
        monkeypatch.delenv("OPENAI_API_KEY")
        assert not flush_cache(server.url, "sglang")
        assert [one["code"] for one in server.log.flushes] == [200, 401, 401]


def test_only_sglang_is_asked_to_empty_its_cache(tmp_path: Path) -> None:
    with running_server(Script(), tmp_path) as server:
        for dialect in ("vllm", "llamacpp", "other"):
            assert not flush_cache(server.url, dialect)
        assert server.log.flushes == []
