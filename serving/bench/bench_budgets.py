"""Tokens per second of budget policies at several loads, interleaved on one server.

    python serving/bench/bench_budgets.py dsl/specs/goodput.yaml --prompts FILE

Every group of prompts is sent once per policy, one policy after the other (the first one rotates
from group to group), so that all meet the same machine noise; the server is told to change its
policy between them. Ratios are those of one group, to plain decoding (budget 0) on the same server.
`--plain` adds a server without any speculative worker, in the same turns: what being off costs.
The one that is not measured is stopped (SIGSTOP).
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx
import psutil
from bench_speedup import accept_length, timed
from rich.console import Console
from rich.progress import Progress

from specstack.budget.cost_store import machine_name
from specstack.plan import Plan
from specstack.prompts import read_prompts
from specstack_serving.generate import chat_ids
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
SERVER_WITHOUT = "plain server"


def budgets_chosen(url: str) -> Counter[str]:
    """Rounds so far, by budget and reason."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    pattern = r'^specstack_rounds_total\{draft_budget="(\d+)".*reason="([^"]+)".*\} (\S+)$'
    found = re.findall(pattern, text, re.MULTILINE)
    return Counter({f"{budget} {reason}": float(value) for budget, reason, value in found})


def use(url: str, section: dict[str, Any]) -> None:
    """Have the server decide by another policy."""
    answer = httpx.post(f"{url}/specstack/budget", json=section, timeout=60.0)
    if answer.is_error:
        raise click.ClickException(f"{section}: {answer.text}")


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
    """One server under all policies, and perhaps one without speculation."""

    def __init__(self, server: Server, plain: Server | None, max_tokens: int) -> None:
        self.server, self.plain, self.max_tokens = server, plain, max_tokens
        self.url = server.url
        self.sides = [*POLICIES, *([SERVER_WITHOUT] if plain else [])]

    def run(self, side: str, group: list[list[int]], level: int) -> dict[str, Any]:
        """Tokens per second of one policy over one group."""
        greedy = {"temperature": 0.0}
        if side == SERVER_WITHOUT:
            assert self.plain is not None
            self.server.stop()
            self.plain.go_on()
            rate, _ = timed(self.plain.url, group, self.max_tokens, level, greedy)
            self.plain.stop()
            self.server.go_on()
            return {"rate": rate}
        use(self.url, POLICIES[side])
        before = budgets_chosen(self.url)
        rate, answers = timed(self.url, group, self.max_tokens, level, greedy)
        chosen = budgets_chosen(self.url) - before
        return {"rate": rate, "accept_length": accept_length(answers), "chosen": chosen}

    def level(self, inputs: list[list[int]], level: int, groups: int) -> dict[str, Any]:
        """All sides at one number of requests in flight."""
        size = 4 * level  # with one in flight as well: an answer is short
        parts = [inputs[i : i + size] for i in range(0, len(inputs), size)][:groups]
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in self.sides}
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"{level} in flight", total=len(parts) * len(self.sides))
            timed(self.url, parts[0][:level], self.max_tokens, level, {"temperature": 0.0})
            for turn, part in enumerate(parts):
                for place in range(len(self.sides)):
                    side = self.sides[(place + turn) % len(self.sides)]
                    runs[side].append(self.run(side, part, level))
                    progress.advance(task)
        return {"concurrency": level, "groups": len(parts), "sides": summary(runs)}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over groups; ratios are of one group each."""
    plain = [run["rate"] for run in runs["plain"]]
    made = {}
    for side, each in runs.items():
        ratios = sorted(run["rate"] / base for run, base in zip(each, plain, strict=True))
        made[side] = {
            "tokens_per_second": statistics.median(run["rate"] for run in each),
            "ratio": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
        }
        if "chosen" in each[0]:
            chosen = sum((run["chosen"] for run in each), Counter[str]())
            made[side]["accept_length"] = statistics.median(run["accept_length"] for run in each)
            made[side]["chosen"] = {k: int(v) for k, v in sorted(chosen.items())}
    return made


def verdict(levels: list[dict[str, Any]]) -> dict[str, Any]:
    """How the goodput policy does against the best fixed budget, plain, and any single one."""
    fixed = [name for name in POLICIES if name.startswith("fixed") or name == "plain"]

    def ratio(level: dict[str, Any], side: str) -> float:
        return float(level["sides"][side]["ratio"])

    def geomean(side: str) -> float:
        return math.exp(statistics.fmean(math.log(ratio(level, side)) for level in levels))

    return {
        "goodput_to_best_fixed": {
            level["concurrency"]: ratio(level, "goodput") / max(ratio(level, f) for f in fixed)
            for level in levels
        },
        "goodput_to_plain": {level["concurrency"]: ratio(level, "goodput") for level in levels},
        "geomean": {side: geomean(side) for side in POLICIES},
    }


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option("--prompts", "files", required=True, multiple=True,
              type=click.Path(exists=True, path_type=Path),
              help="Several are mixed in turn.")  # fmt: skip
@click.option("--max-tokens", default=64, show_default=True, help="Mean length of the answers.")
@click.option("--concurrency", "levels", multiple=True, type=int, default=(1, 2, 4, 8, 16),
              show_default=True)  # fmt: skip
@click.option("--groups", default=2, show_default=True, help="Groups of prompts per load.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE")
@click.option("--plain", is_flag=True, help="Measure a plain server as well.")
def main(
    pipeline: Path,
    files: tuple[Path, ...],
    max_tokens: int,
    levels: tuple[int, ...],
    groups: int,
    overrides: tuple[str, ...],
    plain: bool,
) -> None:
    """Measure the budget policies on PIPELINE, whose budget must allow 15 drafts."""
    console = Console(stderr=True)
    plan = prepare(pipeline, (*overrides, f"engine.port={free_port()}"))
    texts = [read_prompts(file, None) for file in files]
    mixed = [prompt for each in zip(*texts, strict=False) for prompt in each]
    inputs = chat_ids(plan.target.path, mixed)
    results: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "plan": plan.hash,
        "device": machine_name(),
        "levels": [],
    }
    with TemporaryDirectory() as folder, ExitStack() as stack:
        other = None
        if plain:
            port = f"engine.port={free_port()}"
            plain_plan = prepare(pipeline, (*overrides, port, *PLAIN))
            other = stack.enter_context(started(plain_plan, Path(folder, "plain.log")))
            timed(other.url, inputs[:1], max_tokens, 1, {"temperature": 0.0})
            other.stop()
        server = stack.enter_context(started(plan, Path(folder, "log")))
        bench, url = Bench(server, other, max_tokens), server.url
        for level in levels:
            results["levels"].append(bench.level(inputs, level, groups))
            console.print(results["levels"][-1])
        results["costs"] = httpx.get(f"{url}/specstack/status", timeout=60.0).json()["costs"]
    results["verdict"] = verdict(results["levels"])
    click.echo(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
