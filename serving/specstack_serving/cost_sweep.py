"""Measures what rounds take, over HTTP: holds requests in flight and forces budgets on a server.

The server times its own rounds; this only sees to it that rounds of every wanted batch size, budget
and context happen, and then asks for a table to be fitted to them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from specstack.plan import Plan
from specstack_serving.sweep_prompts import sweep_prompt

ROUNDS, COARSE_ROUNDS = 9, 6
CYCLES, COARSE_CYCLES = 3, 2
"""Every budget's rounds are taken in so many parts, in turns with the other budgets': a machine
that is slow for a while is slow for all of them, and what is decided by is their ratio."""
SKIPPED_ROUNDS = 1
"""After a change of budget: that before it counts for the budget that it was decided with."""
SHORT, LONG = 96, 2048
"""Tokens of prompts."""
ANSWER = 320
"""Tokens after which a request makes room for a fresh one, so that contexts stay comparable."""
MAX_REQUESTS = 128
"""Largest batch that is measured unless more is asked for."""
DEFAULT_CONTEXT = 4096
FORCED_SECONDS = 600
"""After which a server goes on by itself, if the sweep is killed."""
STALL_SECONDS = 60.0
READY_SECONDS = 300.0
"""For the prompts of a batch to be read."""


class SweepError(RuntimeError):
    """The server did not do what the sweep needs; says which request and what it answered."""


@dataclass(frozen=True)
class Group:
    """Cells that are measured with the same requests in flight."""

    num_requests: int
    prompt_tokens: int
    budgets: tuple[int, ...]
    rounds: int
    """Measured per budget."""
    cycles: int = 1
    answer_tokens: int = ANSWER
    """After which a request makes room for a fresh one."""


def plan_sweep(
    budgets: Iterable[int],
    *,
    max_requests: int,
    context_length: int,
    max_total_tokens: int | None = None,
    coarse: bool = False,
) -> tuple[Group, ...]:
    """Decide what is measured: batch sizes by powers of two up to `max_requests`, two of them with
    long contexts too; `coarse` takes three and one.

    Args:
        context_length: longest context of the server, in tokens; long prompts stay below it.
        max_total_tokens: of the KV cache; None bounds nothing.
    """
    rounds, cycles = (COARSE_ROUNDS, COARSE_CYCLES) if coarse else (ROUNDS, CYCLES)
    powers = [1 << i for i in range(max_requests.bit_length()) if 1 << i <= max_requests]
    sizes = sorted({1, min(4, max_requests), max_requests} if coarse else {*powers, max_requests})
    answer = min(ANSWER, max(1, (context_length - 64) // 2))
    longest = max(1, context_length - answer - 64)
    kinds = [(size, min(SHORT, longest)) for size in sizes]
    long = min(LONG // 2 if coarse else LONG, longest)
    if long > 2 * (SHORT + answer):
        long_sizes = [1] if coarse else sorted({1, min(4, max_requests)})
        kinds += [(size, long) for size in long_sizes]
    return tuple(
        Group(size, prompt, tuple(sorted({0, *budgets})), rounds, cycles, answer)
        for size, prompt in kinds
        if max_total_tokens is None or size * (prompt + answer + 64) <= max_total_tokens
    )


async def sweep(
    url: str,
    groups: Sequence[Group],
    *,
    command: str,
    say: Callable[[str, int, int], None] = lambda text, done, total: None,
    api_key: str | None = None,
    admin_key: str | None = None,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """Measure `groups` on the server at `url`, which then fits, stores and uses a table.

    Args:
        command: kept in the table, as its source.
        say: told what is measured, and how many of all parts are done.
        vocab_size: sends token ids below it instead of text; None: the server has a tokenizer.

    Returns:
        The server's answer: `costs` (its state) and `path` (the file, on the server's machine).

    Raises:
        SweepError: the server refused, or stalled.
        httpx.TransportError: it is gone.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=_bearer(api_key), limits=limits, timeout=120.0, trust_env=False
    ) as client:
        total = sum(len(group.budgets) * group.cycles for group in groups)
        measurement = _Sweep(client, _bearer(admin_key), say, total, vocab_size)
        return await measurement.run(groups, command)


def vocab_to_send(plan: Plan) -> int | None:
    """`vocab_size` of `sweep`, for a plan's server."""
    if not plan.engine.args.get("skip_tokenizer_init"):
        return None
    return plan.target.facts.vocab_size if plan.target.facts else None


def groups_of(
    plan: Plan, status: Mapping[str, Any], *, coarse: bool, max_requests: int | None = None
) -> tuple[Group, ...]:
    """What is measured of a plan's server, which runs at most `max_requests` at a time.

    Args:
        status: the server's own.
    """
    facts, runs = plan.target.facts, status["max_running_requests"]
    longest = facts.max_position_embeddings if facts else None
    return plan_sweep(
        {
            *(width - 1 for width in plan.shapes.verify_widths),
            *(status["choices"] if plan.engine.device == "cpu" else ()),  # all widths are there
        },
        max_requests=max_requests or min(runs or MAX_REQUESTS, MAX_REQUESTS),
        context_length=plan.engine.context_length or longest or DEFAULT_CONTEXT,
        max_total_tokens=plan.engine.max_total_tokens,
        coarse=coarse,
    )


class _Sweep:
    def __init__(
        self,
        client: httpx.AsyncClient,
        admin: dict[str, str],
        say: Callable[[str, int, int], None],
        total: int,
        vocab_size: int | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._is_fitted = False
        self._client = client
        self._admin = admin
        self._say = say
        self._done, self._total = 0, total
        self._numbers = itertools.count()
        self._requests: list[asyncio.Task[None]] = []

    async def run(self, groups: Sequence[Group], command: str) -> dict[str, Any]:
        await self._until_idle("other requests run on the server")
        try:
            await self._post("costs", {"samples": "clear"})
            for group in groups:
                await self._measure(group)
            answer = await self._post("costs", {"fit": {"command": command}})
            self._is_fitted = True
            return answer
        finally:
            # What ended the sweep is being raised; a server that is gone keeps no budget.
            with suppress(httpx.TransportError):
                await self._post("budget", {"force": None})
                if not self._is_fitted:  # nobody learns from prompts that were made up
                    await self._post("costs", {"samples": "clear"})

    async def _measure(self, group: Group) -> None:
        await self._post("budget", {"force": 0, "seconds": FORCED_SECONDS})
        async with self._in_flight(group):
            await self._until_running(group.num_requests)
            pace: dict[int, float] = {}
            for budget in group.budgets * group.cycles:
                self._say(
                    f"{group.num_requests} requests, about {group.prompt_tokens} tokens, budget"
                    f" {budget}", self._done, self._total,
                )  # fmt: skip
                forced = {"force": budget, "seconds": FORCED_SECONDS}
                first = (await self._post("budget", forced))["rounds"]
                part = SKIPPED_ROUNDS + math.ceil(group.rounds / group.cycles)
                pace[budget] = await self._rounds(part, first, pace.get(budget))
                self._done += 1
                self._say("", self._done, self._total)
        await self._until_idle("the server goes on with requests that were given up")

    @asynccontextmanager
    async def _in_flight(self, group: Group) -> AsyncIterator[None]:
        self._requests = [
            asyncio.create_task(self._keep_one(group.prompt_tokens, group.answer_tokens))
            for _ in range(group.num_requests)
        ]
        try:
            yield
        finally:
            for task in self._requests:
                task.cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)
            self._requests = []

    async def _keep_one(self, prompt_tokens: int, answer_tokens: int) -> None:
        """One request after another, until cancelled; closing its stream aborts it."""
        while True:
            body = {
                **self._prompt(next(self._numbers), prompt_tokens),
                "sampling_params": {
                    "temperature": 0.0, "max_new_tokens": answer_tokens, "ignore_eos": True,
                },
                "stream": True,
            }  # fmt: skip
            async with self._client.stream("POST", "/generate", json=body) as response:
                if response.is_error:
                    text = (await response.aread()).decode(errors="replace").strip()
                    raise SweepError(f"POST /generate: {response.status_code}: {text}")
                async for line in response.aiter_lines():
                    if line.startswith('data: {"error"'):
                        raise SweepError(f"POST /generate: {line.removeprefix('data: ')}")

    def _prompt(self, number: int, num_tokens: int) -> dict[str, Any]:
        if self._vocab_size is None:
            return {"text": sweep_prompt(number, num_tokens)}
        rng = random.Random(number)
        words = [rng.randrange(self._vocab_size) for _ in range(max(1, num_tokens // 4))]
        return {"input_ids": [rng.choice(words) for _ in range(num_tokens)]}

    async def _until_running(self, num_requests: int) -> None:
        """Wait until the server's rounds are over exactly `num_requests` requests."""
        deadline = time.monotonic() + READY_SECONDS
        load: Any = None
        while time.monotonic() < deadline:
            status = await self._status()
            load = status["load"]
            if load is not None and (load["num_running"], load["num_queued"]) == (num_requests, 0):
                return
            await self._pause(0.1)
        raise SweepError(
            f"{num_requests} requests were sent, but after {READY_SECONDS:.0f} s the server runs"
            f" {load}: leave it alone while it is measured, or measure smaller batches"
        )

    async def _rounds(self, num_rounds: int, first: int, pace: float | None) -> float:
        """Wait for so many rounds, asking seldom: every question costs the server time.

        Args:
            first: the number of rounds by now.
            pace: seconds that one takes, if known; returns what it was.
        """
        last, began = first, time.monotonic()
        moved = began
        wait = 0.1 if pace is None else num_rounds * pace
        while last - first < num_rounds:
            await self._pause(wait)
            rounds, now = (await self._status())["rounds"], time.monotonic()
            if rounds > last:
                last, moved = rounds, now
                left = first + num_rounds - last
                wait = min(max(left * (now - began) / (last - first), 0.02), 1.0)
            elif now - moved > STALL_SECONDS:
                raise SweepError(f"no round in {STALL_SECONDS:.0f} s: see the server's log")
        return (moved - began) / (last - first)

    async def _until_idle(self, problem: str) -> None:
        deadline = time.monotonic() + STALL_SECONDS
        before = (await self._status())["rounds"]
        while time.monotonic() < deadline:
            await asyncio.sleep(0.3)
            rounds = (await self._status())["rounds"]
            if rounds == before:
                return
            before = rounds
        raise SweepError(f"{problem}: after {STALL_SECONDS:.0f} s it still runs rounds")

    async def _pause(self, seconds: float) -> None:
        """Sleep; raises what ended a request meanwhile."""
        done, _ = await asyncio.wait(
            self._requests, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()

    async def _status(self) -> dict[str, Any]:
        return _answer(await self._client.get("/specstack/status"))

    async def _post(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        path = f"/specstack/{what}"
        return _answer(await self._client.post(path, json=body, headers=self._admin))


def server_status(url: str, api_key: str | None = None) -> dict[str, Any]:
    """What the server says about itself.

    Raises:
        SweepError: it does not answer as specstack does.
        httpx.TransportError: it cannot be reached.
    """
    path = f"{url}/specstack/status"
    return _answer(httpx.get(path, headers=_bearer(api_key), timeout=30.0, trust_env=False))


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _answer(response: httpx.Response) -> dict[str, Any]:
    where = f"{response.request.method} {response.request.url.path}"
    if response.status_code in (401, 403):
        raise SweepError(f"{where}: {response.status_code}: give the server's key")
    try:
        content = response.json()
    except json.JSONDecodeError:
        content = {"error": response.text.strip()[:200]}
    if response.is_error or not isinstance(content, dict):
        reason = content.get("error", content) if isinstance(content, dict) else content
        raise SweepError(f"{where}: {response.status_code}: {reason}")
    return content
