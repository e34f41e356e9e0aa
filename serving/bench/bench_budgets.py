"""Tokens per second of budget policies at several loads, in turns of seconds on one server.

    python serving/bench/bench_budgets.py dsl/specs/goodput.yaml --prompts FILE

The server is told every few seconds to decide by another policy. Each cycle gives every policy a
turn, so that a machine that is slow for a while is slow for all of them. With up to two requests in
flight all turns of a cycle answer the same prompts, because prompts differ more than policies do.
With more, requests are kept in flight, streaming, and tokens are counted as they arrive, prompts of
new requests and all; the first second of a turn, in which the policy changes, is left out. Ratios
are to plain decoding (budget 0) on the same server; intervals are bootstrapped over cycles.
`--plain` compares budget 0 with a server that has no speculative worker, in turns of the same kind:
what being off costs. The one whose turn it is not is stopped (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

from specstack.budget.cost_store import machine_name
from specstack.plan import Plan
from specstack.prompts import read_prompts
from specstack_serving.generate import chat_ids, generate
from specstack_serving.launch import free_port, running_server
from specstack_serving.lossless import PLAIN
from specstack_serving.main import prepare

CHOICES = (0, 1, 3, 7, 15)
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"kind": "fixed", "draft_budget": 0},
    "fixed:3": {"kind": "fixed", "draft_budget": 3},
    "fixed:7": {"kind": "fixed", "draft_budget": 7},
    "fixed:15": {"kind": "fixed", "draft_budget": 15},
    "ema": {"kind": "ema", "choices": CHOICES[1:]},
    "goodput": {"kind": "goodput", "choices": CHOICES},
}
WITHOUT = "plain server"
PAIRED = 2
"""Most requests in flight at which all policies answer the same prompts."""
SETTLE_SECONDS = 1.0
SAMPLES = 2000
"""Of the bootstrap."""


@dataclass
class Server:
    """A server, its processes (an idle engine keeps a core busy), and requests in flight there."""

    url: str
    processes: list[psutil.Process]
    num_tokens: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def stop(self) -> None:
        """Take it off the processor."""
        for process in self.processes:
            process.suspend()

    def go_on(self) -> None:
        """Let it run again."""
        for process in self.processes:
            process.resume()

    def hold(
        self,
        client: httpx.AsyncClient,
        inputs: Iterator[tuple[list[int], int]],
        num_requests: int,
    ) -> None:
        """Keep so many requests in flight, until `let_go`."""
        one = self._keep_one
        self.tasks = [asyncio.create_task(one(client, inputs)) for _ in range(num_requests)]

    async def let_go(self) -> None:
        """Give up what is in flight."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _keep_one(
        self, client: httpx.AsyncClient, inputs: Iterator[tuple[list[int], int]]
    ) -> None:
        for ids, length in inputs:
            params = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
            body = {"input_ids": ids, "sampling_params": params, "stream": True}
            seen = 0
            async with client.stream("POST", f"{self.url}/generate", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        count = json.loads(line[6:])["meta_info"]["completion_tokens"]
                        self.num_tokens += count - seen
                        seen = count


@contextmanager
def started(plan: Plan, log: Path) -> Iterator[Server]:
    """A server for the length of a block."""
    before = set(psutil.Process().children(recursive=True))
    with running_server(plan, log, timeout_seconds=900.0) as url:
        found = [p for p in psutil.Process().children(recursive=True) if p not in before]
        server = Server(url, found)
        try:
            yield server
        finally:
            server.go_on()


class Bench:
    """Turns of seconds over one server, or two."""

    def __init__(self, inputs: list[list[int]], mean_tokens: int, turn_seconds: float) -> None:
        # Lengths are spread: requests that start together would end together for ever.
        spread = [round(mean_tokens * (0.5 + (i * 0.6180339887) % 1.0)) for i in range(len(inputs))]
        self._inputs = list(zip(inputs, spread, strict=True))
        self._turn_seconds = turn_seconds

    def paired(self, server: Server, level: int, cycles: int) -> dict[str, Any]:
        """All policies over the same prompts, a few at a time."""
        rates: dict[str, list[float]] = {name: [] for name in POLICIES}
        chosen: dict[str, Counter[str]] = {name: Counter() for name in POLICIES}
        names = list(POLICIES)
        for cycle in range(cycles):
            group = self._inputs[cycle * level : (cycle + 1) * level]
            params = [{"temperature": 0.0, "max_new_tokens": n} for _, n in group]
            for place in range(len(names)):
                name = names[(place + cycle) % len(names)]
                url, body = f"{server.url}/specstack/budget", POLICIES[name]
                httpx.post(url, json=body, timeout=60.0).raise_for_status()
                httpx.post(f"{server.url}/flush_cache", timeout=60.0)
                before, began = asyncio.run(_now(server.url)), time.perf_counter()
                answers = generate(server.url, [i for i, _ in group], params, concurrency=level)
                tokens = sum(len(answer.output_ids) for answer in answers)
                rates[name].append(tokens / (time.perf_counter() - began))
                chosen[name] += asyncio.run(_now(server.url)) - before
        return _level(level, rates, chosen)

    async def policies(self, server: Server, level: int, cycles: int) -> dict[str, Any]:
        """All policies at one number of requests in flight."""
        async with self._client() as client:
            server.hold(client, itertools.cycle(self._inputs), level)
            await asyncio.sleep(3.0)
            rates: dict[str, list[float]] = {name: [] for name in POLICIES}
            chosen: dict[str, Counter[str]] = {name: Counter() for name in POLICIES}
            names = list(POLICIES)
            with Progress(console=Console(stderr=True), transient=True) as progress:
                task = progress.add_task(f"{level} in flight", total=cycles * len(names))
                for cycle in range(cycles):
                    for place in range(len(names)):
                        name = names[(place + cycle) % len(names)]
                        answer = await client.post(
                            f"{server.url}/specstack/budget", json=POLICIES[name]
                        )
                        answer.raise_for_status()
                        before = await _chosen(client, server.url)
                        rates[name].append(await self._turn(server))
                        chosen[name] += await _chosen(client, server.url) - before
                        progress.advance(task)
            await server.let_go()
        return _level(level, rates, chosen)

    async def off(self, server: Server, without: Server, level: int, cycles: int) -> dict[str, Any]:
        """Budget 0 against a server without a speculative worker."""
        async with self._client() as client:
            without.stop()
            server.go_on()
            body = POLICIES["plain"]
            (await client.post(f"{server.url}/specstack/budget", json=body)).raise_for_status()
            rates: dict[str, list[float]] = {WITHOUT: [], "plain": []}
            both = {"plain": server, WITHOUT: without}
            for name, one in both.items():
                other = both[WITHOUT if name == "plain" else "plain"]
                other.stop()
                one.go_on()
                one.hold(client, itertools.cycle(self._inputs), level)
                await asyncio.sleep(3.0)
            for cycle in range(cycles):
                for name in sorted(both, reverse=bool(cycle % 2)):
                    other = both[WITHOUT if name == "plain" else "plain"]
                    other.stop()
                    both[name].go_on()
                    rates[name].append(await self._turn(both[name]))
            for one in both.values():
                one.go_on()
                await one.let_go()
        return {"concurrency": level, "cycles": cycles, "sides": _summary(rates, base=WITHOUT)}

    async def _turn(self, server: Server) -> float:
        """Tokens per second of one turn."""
        await asyncio.sleep(SETTLE_SECONDS)
        tokens, began = server.num_tokens, time.perf_counter()
        await asyncio.sleep(self._turn_seconds)
        return (server.num_tokens - tokens) / (time.perf_counter() - began)

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)


def _level(
    level: int, rates: dict[str, list[float]], chosen: dict[str, Counter[str]]
) -> dict[str, Any]:
    sides = _summary(rates)
    for name, side in sides.items():
        side["chosen"] = {k: int(v) for k, v in sorted(chosen[name].items())}
    return {"concurrency": level, "cycles": len(rates["plain"]), "sides": sides}


async def _now(url: str) -> Counter[str]:
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        return await _chosen(client, url)


async def _chosen(client: httpx.AsyncClient, url: str) -> Counter[str]:
    """Rounds so far, by budget and reason."""
    text = (await client.get(f"{url}/metrics")).text
    pattern = r'^specstack_rounds_total\{draft_budget="(\d+)".*reason="([^"]+)".*\} (\S+)$'
    found = re.findall(pattern, text, re.MULTILINE)
    return Counter({f"{budget} {reason}": float(value) for budget, reason, value in found})


def _summary(rates: dict[str, list[float]], base: str = "plain") -> dict[str, dict[str, Any]]:
    """Means over turns of equal length; ratios with 95 % intervals over cycles."""
    table = np.array(list(rates.values()))  # [sides, cycles]
    random = np.random.default_rng(0)
    draws = table[:, random.integers(table.shape[1], size=(SAMPLES, table.shape[1]))].mean(axis=2)
    row = list(rates).index(base)
    made: dict[str, dict[str, Any]] = {}
    for name, each, drawn in zip(rates, table, draws, strict=True):
        low, high = np.percentile(drawn / draws[row], [2.5, 97.5])
        made[name] = {
            "tokens_per_second": round(float(each.mean()), 2),
            "ratio": round(float(each.mean() / table[row].mean()), 4),
            "interval": [round(float(low), 3), round(float(high), 3)],
        }
    return made


def verdict(levels: list[dict[str, Any]]) -> dict[str, Any]:
    """How goodput does against the best fixed budget, plain, and any single one."""
    fixed = [name for name in POLICIES if name.startswith("fixed") or name == "plain"]

    def ratio(level: dict[str, Any], side: str) -> float:
        return float(level["sides"][side]["ratio"])

    def geomean(side: str) -> float:
        return math.exp(sum(math.log(ratio(level, side)) for level in levels) / len(levels))

    best = {one["concurrency"]: max(ratio(one, name) for name in fixed) for one in levels}
    return {
        "goodput_to_best_fixed": {
            one["concurrency"]: round(ratio(one, "goodput") / best[one["concurrency"]], 3)
            for one in levels
        },
        "goodput_to_plain": {one["concurrency"]: ratio(one, "goodput") for one in levels},
        "geomean": {side: round(geomean(side), 3) for side in POLICIES},
    }


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option("--prompts", "files", required=True, multiple=True,
              type=click.Path(exists=True, path_type=Path),
              help="Several are mixed in turn.")  # fmt: skip
@click.option("--max-tokens", default=96, show_default=True, help="Mean length of the answers.")
@click.option("--concurrency", "levels", multiple=True, type=int, default=(1, 2, 4, 8, 16),
              show_default=True)  # fmt: skip
@click.option("--cycles", default=6, show_default=True, help="Turns of every policy per load.")
@click.option("--seconds", default=3.5, show_default=True, help="Length of a turn.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE")
@click.option("--plain", is_flag=True, help="Measure what being off costs, instead.")
def main(
    pipeline: Path,
    files: tuple[Path, ...],
    max_tokens: int,
    levels: tuple[int, ...],
    cycles: int,
    seconds: float,
    overrides: tuple[str, ...],
    plain: bool,
) -> None:
    """Measure the budget policies on PIPELINE, whose budget must allow 15 drafts."""
    console = Console(stderr=True)
    plan = prepare(pipeline, (*overrides, f"engine.port={free_port()}"))
    texts = [read_prompts(file, None) for file in files]
    mixed = [prompt for each in zip(*texts, strict=False) for prompt in each]
    bench = Bench(chat_ids(plan.target.path, mixed), max_tokens, seconds)
    results: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "plan": plan.hash,
        "device": machine_name(),
        "levels": [],
    }
    with TemporaryDirectory() as folder, ExitStack() as stack:
        server = stack.enter_context(started(plan, Path(folder, "log")))
        without = None
        if plain:
            server.stop()
            port = f"engine.port={free_port()}"
            plain_plan = prepare(pipeline, (*overrides, port, *PLAIN))
            without = stack.enter_context(started(plain_plan, Path(folder, "plain.log")))
        for level in levels:
            if without is not None:
                made = asyncio.run(bench.off(server, without, level, cycles))
            elif level <= PAIRED:
                made = bench.paired(server, level, cycles)
            else:
                made = asyncio.run(bench.policies(server, level, cycles))
            results["levels"].append(made)
            console.print(made)
        if without is None:
            status = httpx.get(f"{server.url}/specstack/status", timeout=60.0).json()
            results["costs"] = status["costs"]
            results["verdict"] = verdict(results["levels"])
    click.echo(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
