"""The server under test: where it may be, what it serves, and which dialect of the API it speaks.

Proxies of the environment are not used: the server is the one that the user names.
"""

from __future__ import annotations

import ipaddress
import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import httpx

Dialect = Literal["sglang", "vllm", "llamacpp", "other"]
DIALECTS: tuple[Dialect, ...] = ("sglang", "vllm", "llamacpp", "other")
API_KEY = "OPENAI_API_KEY"
"""Environment variable with the key that every request carries."""
PATIENCE_S = 60.0
"""How long a server may say that it is not ready yet."""
FLUSH_PATIENCE_S, FLUSH_AGAIN_S = 5.0, 0.5
"""How long a server may refuse to empty its cache, and how often it is asked."""


class ServerUnusable(RuntimeError):
    """The server is not there, or not what a load test needs; no request can succeed."""


class RemoteRefused(ValueError):
    """The server is on another machine, and nobody said that it may be loaded."""


class OptOutUnknown(ServerUnusable):
    """The server has no way to be asked for plain decoding."""


@dataclass(frozen=True)
class Served:
    """What requests name, and which extensions of the API they may use."""

    model: str
    dialect: Dialect

    def require_opt_out(self) -> None:
        """Let pass what may be a server of specstack.

        Raises:
            OptOutUnknown: it is none.
        """
        if self.dialect != "sglang":
            raise OptOutUnknown(
                "the server has no opt-out of speculation: only those of specstack have"
            )


def base_url(url: str) -> str:
    """The URL without its end `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def check_address(url: str, allow_remote: bool) -> None:
    """Let pass what may be loaded.

    Raises:
        RemoteRefused: it is not on this machine, and that was not allowed.
        ServerUnusable: it is no URL.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServerUnusable(f"{url!r} is no URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServerUnusable(f"{url!r} is no URL: expected http://HOST:PORT")
    if not allow_remote and not _is_loopback(parsed.host):
        raise RemoteRefused(
            f"{url} is not on this machine: load can slow it down for everybody who uses it, and"
            " can look like an attack; if it is yours to load, say --allow-remote"
        )


def new_http(timeout_s: float) -> httpx.Client:
    """A client for single questions."""
    return httpx.Client(timeout=timeout_s, headers=authorization(), trust_env=False)


def authorization() -> dict[str, str]:
    """The header with the API key, if the environment has one."""
    key = os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def identify(url: str, model: str | None = None, *, patience_s: float = PATIENCE_S) -> Served:
    """Ask the server what it serves; wait while it says 503, which servers do as they start.

    Args:
        model: which one is meant, of several.

    Raises:
        ServerUnusable: no server is there, or it does not list its models, or none or several.
    """
    listed = _models(url, patience_s)
    try:
        # an adapter has a parent; requests mean the model itself
        models = {str(one["id"]): one for one in listed["data"] if not one.get("parent")}
    except (LookupError, TypeError, AttributeError) as error:
        raise ServerUnusable(f"{url}/v1/models is no list of models: {error!r}") from None
    names = ", ".join(models) or "nothing"
    if model is not None and model not in models:
        raise ServerUnusable(f"{url} does not serve {model!r}, but {names}")
    if model is None and len(models) != 1:
        raise ServerUnusable(f"{url} serves {names}: expected one model")
    name = next(iter(models)) if model is None else model
    owner = str(models[name].get("owned_by"))
    return Served(name, next((dialect for dialect in DIALECTS if dialect == owner), "other"))


def flush_cache(url: str, dialect: Dialect, *, patience_s: float = FLUSH_PATIENCE_S) -> bool:
    """Empty the server's prefix cache, so that a run finds nothing of another one in it.

    SGLang's `/flush_cache` answers 400 while requests run, which those of a run before may still
    do; with an admin key it takes no other one. Servers of other dialects are not asked.

    Returns:
        Whether it was emptied.
    """
    if dialect != "sglang":
        return False
    address, deadline = f"{base_url(url)}/flush_cache", time.monotonic() + patience_s
    with new_http(10.0) as http:
        while True:
            try:
                code = http.post(address).status_code
            except httpx.TransportError:
                return False
            if code != 400 or time.monotonic() > deadline:
                return code == 200
            time.sleep(FLUSH_AGAIN_S)


def _models(url: str, patience_s: float) -> Any:
    address, deadline = f"{base_url(url)}/v1/models", time.monotonic() + patience_s
    with new_http(10.0) as http:
        while True:
            try:
                response = http.get(address)
            except httpx.TransportError as error:
                raise ServerUnusable(
                    f"no server answers at {url}: {str(error) or type(error).__name__}"
                ) from None
            if response.status_code != 503 or time.monotonic() > deadline:
                break
            time.sleep(0.5)
    if response.status_code != 200:
        hint = f"\nset {API_KEY}" if response.status_code in (401, 403) else ""
        text = response.text.strip()[:200]
        raise ServerUnusable(f"{address} answered {response.status_code}: {text}{hint}")
    try:
        return response.json()
    except ValueError:
        raise ServerUnusable(f"{address} answered no JSON: {response.text[:200]!r}") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
