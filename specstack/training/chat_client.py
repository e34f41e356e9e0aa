"""A client of an OpenAI-compatible server: what it serves, and one answer with retries.

Proxies of the environment are not used: the server is the one that the user names.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from specstack.prompts import Prompt
from specstack.training.answers import Answer, NoAnswer, from_completion
from specstack.training.answers_meta import Settings

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
RETRIED = frozenset({408, 409, 425, 429})
"""Besides all of 500 and above: trouble of the moment. Other 4xx would be answered the same."""
FATAL = frozenset({401, 403, 404, 405})
"""Not about the prompt: every request would be answered like this."""


class ServerUnusable(RuntimeError):
    """The server is not there, or not what the command line says; no request can succeed."""


class PromptFailed(RuntimeError):
    """One prompt has no answer; the text says why."""


class _Again(Exception):
    """An attempt failed in a way that the next one may not; `fatal`: the server may be gone."""

    def __init__(self, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.fatal = fatal


def is_http_url(text: str) -> bool:
    """Whether a client can be made for it."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


class ChatClient:
    """One connection pool to one server; an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        timeout_s: float,
        retries: int,
        api_key: str | None = None,
    ) -> None:
        """`url` ends before /chat/completions; a request is tried 1 + `retries` times."""
        self.url = url.rstrip("/")
        self._retries = retries
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx.Limits(max_connections=concurrency),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of what is served.

        Raises:
            ServerUnusable: it cannot be asked.
        """
        try:
            response = await self._http.get(f"{self.url}/models")
        except httpx.TransportError as error:
            raise ServerUnusable(f"no server answers at {self.url}: {_words(error)}") from None
        if response.status_code != 200:
            raise ServerUnusable(
                f"{self.url}/models answered {_refusal(response)}\n"
                "give the URL up to and including /v1"
            )
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerUnusable(f"{self.url}/models is not a list of models: {error!r}") from None

    async def server_info(self) -> dict[str, Any]:
        """What the server says of itself, for the record: its URL and, from SGLang, more."""
        info: dict[str, Any] = {"url": self.url}
        try:
            response = await self._http.get(f"{self.url.removesuffix('/v1')}/server_info")
            found = response.json() if response.status_code == 200 else {}
            for name in ("version", "model_path", "dtype", "quantization"):
                if name in found:
                    info[name] = found[name]
            for state in found.get("internal_states", ())[:1]:
                if "specstack" in state:
                    info["specstack"] = state["specstack"]
        except (httpx.TransportError, ValueError, AttributeError, TypeError):
            pass  # another server, which does not have this page
        return info

    async def answer(self, prompt: Prompt, settings: Settings) -> Answer:
        """Ask once, and again after trouble of the moment.

        Raises:
            PromptFailed: the server refuses this prompt, or trouble lasted through the retries.
            ServerUnusable: the server is gone, or refuses whatever it is asked.
        """
        body = settings.request(prompt.line)
        body["messages"] = [message.as_data() for message in prompt.messages]
        for attempt in range(self._retries + 1):
            try:
                return from_completion(prompt, await self._ask(body))
            except NoAnswer as error:
                raise PromptFailed(str(error)) from None
            except _Again as error:
                if attempt == self._retries:
                    text = f"{error} ({attempt + 1} attempts)"
                    raise (ServerUnusable if error.fatal else PromptFailed)(text) from None
            delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2**attempt)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")

    async def _ask(self, body: dict[str, Any]) -> Any:
        try:
            response = await self._http.post(f"{self.url}/chat/completions", json=body)
        except httpx.TimeoutException as error:
            gone = isinstance(error, httpx.ConnectTimeout)
            raise _Again(f"timeout: {_words(error)}", fatal=gone) from None
        except httpx.TransportError as error:
            raise _Again(f"the server at {self.url} is gone: {_words(error)}", fatal=True) from None
        code = response.status_code
        if code >= 500 or code in RETRIED:
            raise _Again(_refusal(response))
        if code in FATAL:
            raise ServerUnusable(f"{self.url}/chat/completions answered {_refusal(response)}")
        if code != 200:
            raise PromptFailed(_refusal(response))
        try:
            reply = response.json()
        except ValueError:
            raise NoAnswer(f"not JSON: {response.text[:200]}") from None
        if _is_aborted(reply):
            raise _Again("the server aborted the request")
        return reply


def _is_aborted(reply: Any) -> bool:
    """SGLang ends a request so when it shuts down: what there is of the text is no answer."""
    try:
        return bool(reply["choices"][0]["finish_reason"] == "abort")
    except (LookupError, TypeError):
        return False


def _refusal(response: httpx.Response) -> str:
    return f"{response.status_code}: {response.text.strip()[:500]}"


def _words(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
