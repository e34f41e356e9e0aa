"""Tokens per second with and without speculation, prompt by prompt, on one server.

    python serving/bench/bench_speedup.py dsl/specs/quickstart.yaml \
        --prompts serving/bench/data/copy_heavy.jsonl

Every group of prompts is sent twice in a row, once with the per-request opt-out, so that both
sides meet the same machine noise; which side goes first alternates. The opt-out decodes one token
a round.
`host_share` is the part of a round that is not the target's forward: drafting, building, accepting;
`draft_share` is the drafter's.
`--plain` adds a server without any speculative worker, to show what the opt-out costs beside it.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import track

from specstack.applications import PLAIN_OVERRIDES
from specstack.processes import free_port
from specstack.prompts import read_prompts
from specstack_serving.generate import Generation, chat_ids, generate
from specstack_serving.launch import running_server
from specstack_serving.main import prepare

OPT_OUT = {"custom_params": {"specstack": {"speculate": False}}}


def lengths(num: int, mean: int) -> list[int]:
    """Answer lengths spread evenly over half to one and a half times `mean`, in a fixed order.

    With one length for all, requests that start together end together for ever: plain decoding
    would run in lockstep and have its prompts processed in batches, as real traffic never has.
    """
    return [round(mean * (0.5 + (i * 0.6180339887) % 1.0)) for i in range(num)]


def timed(
    url: str,
    inputs: Sequence[Sequence[int]],
    mean_tokens: int,
    concurrency: int,
    extra: dict[str, Any],
) -> tuple[float, list[Generation]]:
    """Tokens per second of one group, its prompts processed anew, and its answers."""
    params = [{"max_new_tokens": length, **extra} for length in lengths(len(inputs), mean_tokens)]
    httpx.post(f"{url}/flush_cache", timeout=30.0)
    started = time.perf_counter()
    answers = generate(url, inputs, params, concurrency=concurrency)
    seconds = time.perf_counter() - started
    return sum(len(a.output_ids) for a in answers) / seconds, answers


def accept_length(answers: Sequence[Generation]) -> float:
    """Emitted tokens per round of a request; the first token comes from the prefill."""
    rounds = sum(a.meta["spec_verify_ct"] for a in answers)
    return sum(len(a.output_ids) - 1 for a in answers) / rounds


PHASES = ("draft", "build", "verify", "accept")


def phase_seconds(url: str) -> dict[str, float]:
    """Seconds that all rounds so far have spent in each phase, from the server's metrics."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    found = re.findall(r"^specstack_(\w+)_seconds_sum\{.*\} (\S+)$", text, re.MULTILINE)
    return {phase: sum(float(v) for name, v in found if name == phase) for phase in PHASES}


def grouped(inputs: list[list[int]], concurrency: int) -> list[list[list[int]]]:
    """Prompts that are timed together.

    With several in flight, a group has four times as many: speculation spreads the requests'
    ends, and a group without successors would measure its slowest request.
    """
    size = concurrency if concurrency == 1 else 4 * concurrency
    return [inputs[i : i + size] for i in range(0, len(inputs), size)]


def measure(
    url: str, inputs: list[list[int]], max_tokens: int, concurrency: int, sampling: dict[str, Any]
) -> dict[str, Any]:
    """Paired medians over groups of prompts."""
    groups = grouped(inputs, concurrency)
    timed(url, groups[0][:concurrency], max_tokens, concurrency, sampling)
    pairs, answers, identical = [], [], 0
    spent = dict.fromkeys(PHASES, 0.0)
    for i, group in enumerate(track(groups, f"concurrency {concurrency}", transient=True)):
        sides = {"speculative": sampling, "plain": sampling | OPT_OUT}
        rates: dict[str, tuple[float, list[Generation]]] = {}
        for side in sorted(sides, reverse=bool(i % 2)):
            before = phase_seconds(url)
            rates[side] = timed(url, group, max_tokens, concurrency, sides[side])
            if side == "speculative":
                after = phase_seconds(url)
                spent = {phase: spent[phase] + after[phase] - before[phase] for phase in PHASES}
        pairs.append((rates["speculative"][0], rates["plain"][0]))
        answers += rates["speculative"][1]
        identical += [a.output_ids for a in rates["speculative"][1]] == [
            a.output_ids for a in rates["plain"][1]
        ]
    ratios = sorted(a / b for a, b in pairs)
    return {
        "concurrency": concurrency,
        "groups": len(pairs),
        "identical_groups": identical,
        "accept_length": accept_length(answers),
        "tokens_per_second": statistics.median(a for a, _ in pairs),
        "tokens_per_second_plain": statistics.median(b for _, b in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "draft_share": spent["draft"] / sum(spent.values()),
        "host_share": 1.0 - spent["verify"] / sum(spent.values()),
    }


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option("--prompts", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--num", default=None, type=int, help="Use the first NUM prompts.")
@click.option("--max-tokens", default=128, show_default=True, help="Mean length of the answers.")
@click.option("--concurrency", "levels", multiple=True, type=int, default=(1,), show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="0: answers must be equal.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE")
@click.option("--plain", is_flag=True, help="Measure a plain server as well.")
def main(
    pipeline: Path,
    prompts: Path,
    num: int | None,
    max_tokens: int,
    levels: tuple[int, ...],
    temperature: float,
    overrides: tuple[str, ...],
    plain: bool,
) -> None:
    """Measure PIPELINE."""
    console, sampling = Console(stderr=True), {"temperature": temperature}
    port = f"engine.port={free_port()}"
    plan = prepare(pipeline, (*overrides, port))
    inputs = chat_ids(plan.target.path, read_prompts(prompts, num))
    results: dict[str, Any] = {"plan": plan.hash, "prompts": str(prompts), "speculative": []}
    with TemporaryDirectory() as folder:
        with running_server(plan, Path(folder, "log")) as url:
            for level in levels:
                results["speculative"].append(measure(url, inputs, max_tokens, level, sampling))
                console.print(results["speculative"][-1])
        if plain:
            plain_plan = prepare(pipeline, (*overrides, port, *PLAIN_OVERRIDES))
            with running_server(plain_plan, Path(folder, "log")) as url:
                for level in levels:
                    timed(url, inputs[:level], max_tokens, level, sampling)
                    groups = grouped(inputs, level)
                    rates = [timed(url, group, max_tokens, level, sampling)[0] for group in groups]
                    results[f"plain_server_c{level}"] = statistics.median(rates)
    click.echo(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
