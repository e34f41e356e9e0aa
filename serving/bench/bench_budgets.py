"""Tokens per second of budget policies at several loads, in turns on one server.

    python serving/bench/bench_budgets.py dsl/specs/quickstart.yaml --prompts FILE

Each cycle takes other prompts and gives every policy a turn at them, beginning with another one, so
that neither prompts nor a machine that is slow for a while favour a policy. A turn answers
PER_PLACE prompts for each request in flight, which end at different lengths; prompt processing and
the thinner end are in its time. Ratios are to plain decoding (budget 0) on the same server;
intervals are bootstrapped over cycles. `--plain` compares budget 0 with a server that has no
speculative worker, in turns of the same kind: what being off costs. The one whose turn it is not is
stopped (SIGSTOP).
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

from specstack.applications import PLAIN_OVERRIDES
from specstack.budget.cost_store import machine_name
from specstack.plan import Plan
from specstack.processes import free_port
from specstack.prompts import read_prompts
from specstack_serving.generate import chat_ids, generate
from specstack_serving.launch import running_server
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
PER_PLACE = 2
"""Prompts of a turn for each request in flight."""
SAMPLES = 2000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Server:
    """A server and its processes: an idle engine keeps a core busy."""

    url: str
    processes: list[psutil.Process]

    def stop(self) -> None:
        """Take it off the processor."""
        for process in self.processes:
            process.suspend()

    def go_on(self) -> None:
        """Let it run again."""
        for process in self.processes:
            process.resume()

    def decide_by(self, policy: dict[str, Any]) -> None:
        """Change its budget policy."""
        url = f"{self.url}/specstack/budget"
        httpx.post(url, json=policy, timeout=60.0).raise_for_status()

    def chosen(self) -> Counter[str]:
        """Rounds so far, by budget and reason."""
        text = httpx.get(f"{self.url}/metrics", timeout=60.0).text
        pattern = r'^specstack_rounds_total\{draft_budget="(\d+)".*reason="([^"]+)".*\} (\S+)$'
        found = re.findall(pattern, text, re.MULTILINE)
        return Counter({f"{budget} {reason}": float(value) for budget, reason, value in found})


@contextmanager
def started(plan: Plan, log: Path) -> Iterator[Server]:
    """A server for the length of a block."""
    before = set(psutil.Process().children(recursive=True))
    with running_server(plan, log) as url:
        found = [p for p in psutil.Process().children(recursive=True) if p not in before]
        server = Server(url, found)
        try:
            yield server
        finally:
            server.go_on()


class Bench:
    """Turns over one server, or two."""

    def __init__(self, inputs: list[list[int]], mean_tokens: int) -> None:
        # Lengths are spread: requests that start together would end together for ever.
        spread = [round(mean_tokens * (0.5 + (i * 0.6180339887) % 1.0)) for i in range(len(inputs))]
        self._inputs = list(zip(inputs, spread, strict=True))

    def policies(self, server: Server, level: int, cycles: int) -> dict[str, Any]:
        """All policies at one number of requests in flight."""
        rates: dict[str, list[float]] = {name: [] for name in POLICIES}
        chosen: dict[str, Counter[str]] = {name: Counter() for name in POLICIES}
        for cycle, name in _turns(list(POLICIES), cycles, f"{level} in flight"):
            server.decide_by(POLICIES[name])
            before = server.chosen()
            rates[name].append(self._turn(server, level, cycle))
            chosen[name] += server.chosen() - before
        sides = _summary(rates)
        for name, side in sides.items():
            side["chosen"] = {k: int(v) for k, v in sorted(chosen[name].items())}
        return {"concurrency": level, "cycles": cycles, "sides": sides}

    def off(self, server: Server, without: Server, level: int, cycles: int) -> dict[str, Any]:
        """Budget 0 against a server without a speculative worker."""
        both = {WITHOUT: without, "plain": server}
        without.stop()
        server.go_on()
        server.decide_by(POLICIES["plain"])
        rates: dict[str, list[float]] = {name: [] for name in both}
        for cycle, name in _turns(list(both), cycles, f"{level} in flight"):
            both[WITHOUT if name == "plain" else "plain"].stop()
            both[name].go_on()
            rates[name].append(self._turn(both[name], level, cycle))
        return {"concurrency": level, "cycles": cycles, "sides": _summary(rates, base=WITHOUT)}

    def _turn(self, server: Server, level: int, cycle: int) -> float:
        """Tokens per second over the prompts of a cycle."""
        first = cycle * PER_PLACE * level
        group = [self._inputs[(first + i) % len(self._inputs)] for i in range(PER_PLACE * level)]
        params = [
            {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
            for _, length in group
        ]
        httpx.post(f"{server.url}/flush_cache", timeout=60.0)
        began = time.perf_counter()
        answers = generate(server.url, [ids for ids, _ in group], params, concurrency=level)
        tokens = sum(len(answer.output_ids) for answer in answers)
        return tokens / (time.perf_counter() - began)


def _turns(names: list[str], cycles: int, title: str) -> Iterator[tuple[int, str]]:
    """(cycle, name), with a bar."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=cycles * len(names))
        for cycle in range(cycles):
            for place in range(len(names)):
                yield cycle, names[(place + cycle) % len(names)]
                progress.advance(task)


def _summary(rates: dict[str, list[float]], base: str = "plain") -> dict[str, dict[str, Any]]:
    """Means over turns; ratios with 95 % intervals over cycles, whose prompts all sides share."""
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
            "turns": [round(rate, 2) for rate in each.tolist()],
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
@click.option("--max-tokens", default=64, show_default=True, help="Mean length of the answers.")
@click.option("--concurrency", "levels", multiple=True, type=int, default=(1, 2, 4, 8, 16),
              show_default=True)  # fmt: skip
@click.option("--cycles", default=6, show_default=True, help="Turns of every policy per load.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE")
@click.option("--plain", is_flag=True, help="Measure what being off costs, instead.")
def main(
    pipeline: Path,
    files: tuple[Path, ...],
    max_tokens: int,
    levels: tuple[int, ...],
    cycles: int,
    overrides: tuple[str, ...],
    plain: bool,
) -> None:
    """Measure the budget policies on PIPELINE, whose budget must allow 15 drafts."""
    console = Console(stderr=True)
    plan = prepare(pipeline, (*overrides, f"engine.port={free_port()}"))
    texts = [read_prompts(file, None) for file in files]
    mixed = [prompt for each in zip(*texts, strict=False) for prompt in each]
    bench = Bench(chat_ids(plan.target.path, mixed), max_tokens)
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
            plain_plan = prepare(pipeline, (*overrides, port, *PLAIN_OVERRIDES))
            without = stack.enter_context(started(plain_plan, Path(folder, "plain.log")))
        for level in levels:
            if without is not None:
                made = bench.off(server, without, level, cycles)
            else:
                made = bench.policies(server, level, cycles)
            results["levels"].append(made)
            console.print(made)
        if without is None:
            status = httpx.get(f"{server.url}/specstack/status", timeout=60.0).json()
            results["costs"] = status["costs"]
            results["verdict"] = verdict(results["levels"])
    click.echo(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
