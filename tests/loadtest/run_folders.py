"""Folders of load tests that were never run: raw files with known answers, and whole comparisons.

`answer` makes one request record, `write_folder` a folder around runs; `simulated` makes runs of a
closed or an open loop on a server whose speed is a formula.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specstack_loadtest.folder import Manifest
from specstack_loadtest.records import RequestRecord
from specstack_loadtest.summary import summarise

CLOSED = """\
version: 1
name: {name}
description: {description}
arrivals: {{kind: closed, users: {users}}}
workload: {{prompts: [inputs/prompts.jsonl], output_tokens: 32}}
stop: {{seconds: {seconds}}}
warmup: {{seconds: {warmup}}}
slo: {{ttft_ms: 500, tpot_ms: 60}}
"""
OPEN = """\
version: 1
name: {name}
description: {description}
arrivals: {{kind: poisson, rate: {rate}}}
workload: {{prompts: [inputs/prompts.jsonl], output_tokens: 32}}
stop: {{seconds: {seconds}}}
warmup: {{seconds: {warmup}}}
slo: {{ttft_ms: 500, tpot_ms: 60}}
"""


def closed(
    users: Iterable[int] = (2,), seconds: float = 40, warmup: float = 10, **names: str
) -> str:
    """A scenario file of a closed loop."""
    return CLOSED.format(users=list(users), seconds=seconds, warmup=warmup, **_named(names))


def open_loop(rate: float = 1.0, seconds: float = 40, warmup: float = 10, **names: str) -> str:
    """A scenario file of an open loop."""
    return OPEN.format(rate=rate, seconds=seconds, warmup=warmup, **_named(names))


def _named(names: Mapping[str, str]) -> dict[str, str]:
    named = {"name": "made-up", "description": "Made up, for tests.", **names}
    return {key: json.dumps(value) for key, value in named.items()}


def answer(
    due_s: float,
    *,
    phase: int = 0,
    index: int = 0,
    turn: int = 0,
    late_s: float = 0.0,
    ttft_s: float = 0.1,
    gap_s: float = 0.05,
    chunks: int = 4,
    per_chunk: int = 1,
    **changes: Any,
) -> RequestRecord:
    """A whole answer: its first chunk after `ttft_s`, then one every `gap_s`."""
    chunk_s = tuple(due_s + ttft_s + gap_s * k for k in range(chunks))
    record = RequestRecord(
        phase=phase, index=index, turn=turn, worker=0, warmup=False, due_s=due_s,
        sent_s=due_s + late_s, chunk_s=chunk_s,
        chunk_tokens=tuple(per_chunk * (k + 1) for k in range(chunks)),
        end_s=chunk_s[-1] if chunk_s else due_s + ttft_s, error=None, detail="",
        finish_reason="length", prompt_tokens=20, cached_tokens=5, output_tokens=per_chunk * chunks,
        max_tokens=32, temperature=0.0, text_sha256=f"text of {phase} {index} {turn}",
        num_correct_drafts=None, num_proposed_drafts=None, num_rounds=None,
        correct_drafts_histogram=(),
    )  # fmt: skip
    return replace(record, **changes)


def failed(due_s: float, kind: str = "http_503", **changes: Any) -> RequestRecord:
    """A request that was refused after 10 ms."""
    nothing = {"chunks": 0, "output_tokens": None, "finish_reason": None, "text_sha256": ""}
    return answer(due_s, ttft_s=0.01, error=kind, detail="no", **{**nothing, **changes})


@dataclass(frozen=True)
class RawRun:
    """What one run leaves."""

    records: tuple[RequestRecord, ...]
    scrapes: tuple[tuple[float, dict[str, float]], ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    server: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    reason: str = ""
    cache_flushed: bool = True

    def write(self, raw: Path) -> None:
        """Write its files."""
        raw.mkdir(parents=True, exist_ok=True)
        lines = {
            "requests.jsonl": [r.as_line() for r in sorted(self.records, key=lambda r: r.identity)],
            "metrics.jsonl": [json.dumps({"t_s": t, "values": v}) for t, v in self.scrapes],
            "client.jsonl": [json.dumps(sample) for sample in self.samples],
        }
        for name, found in lines.items():
            (raw / name).write_text("".join(f"{line}\n" for line in found), "utf-8")
        outcome = {
            "complete": self.complete,
            "reason": self.reason,
            "cache_flushed": self.cache_flushed,
            "epoch": 1.8e9,
            "url": "made up",
        }
        (raw / "run.json").write_text(json.dumps(outcome), "utf-8")
        (raw / "server.json").write_text(json.dumps(self.server), "utf-8")


def write_folder(
    folder: Path,
    scenario: str,
    runs: Mapping[tuple[str, int], RawRun],
    baseline: str | None = "plain",
    repeats: int | None = None,
) -> Path:
    """Write everything that a comparison leaves before its summary."""
    (folder / "inputs").mkdir(parents=True)
    (folder / "inputs/prompts.jsonl").write_text('{"prompt": "Hello?"}\n')
    (folder / "scenario.yaml").write_text(scenario, "utf-8")
    for (side, repeat), run in runs.items():
        run.write(folder / "raw" / side / str(repeat))
    sides = tuple(dict.fromkeys(side for side, _ in runs))
    manifest = Manifest(
        kind="compare", scenario={"name": "made-up", "file": "made-up.yaml", "sha256": "0" * 64},
        sides=sides, baseline=baseline,
        repeats=repeats or 1 + max(repeat for _, repeat in runs),
        side_facts={side: {"pipeline": f"{side}.yaml"} for side in sides}, num_workers=1,
        command="specstack load compare made-up", created_at="2026-01-01T00:00:00+00:00",
        versions={"specstack": "0", "python": "3"}, commit="0123456789ab", machine="a machine",
    )  # fmt: skip
    manifest.as_of_now(folder).write(folder)
    return folder


def one_result(folder: Path, *runs: RawRun, scenario: str | None = None) -> dict[str, Any]:
    """The only result of repeats of one side in one phase of 40 s, of which 10 s are warm-up."""
    listed = {("server", repeat): run for repeat, run in enumerate(runs)}
    summary = summarise(write_folder(folder / "f", scenario or closed(), listed, baseline=None))
    (result,) = summary["results"]
    assert isinstance(result, dict)
    return result


def idle_client(
    seconds: float, cpu: float = 0.1, lag_s: float = 0.001
) -> tuple[dict[str, Any], ...]:
    """A sample a second of a client that has little to do."""
    return tuple(
        {"t_s": float(t), "worker": 0, "lag_s": lag_s, "cpu": cpu} for t in range(1, int(seconds))
    )


@dataclass(frozen=True)
class Speed:
    """A server as a formula: seconds per round with n requests, and tokens per round."""

    base_s: float = 0.025
    per_request_s: float = 0.004
    budget: int = 0

    def round_s(self, num: int, random: np.random.Generator) -> float:
        """One round with so many requests."""
        return (self.base_s + self.per_request_s * num) * float(random.uniform(0.9, 1.1))


def simulated(
    speed: Speed, users: Iterable[int], seconds: float, warmup: float, seed: int,
    num_tokens: int = 32, cap: int = 16,
) -> RawRun:  # fmt: skip
    """Users who ask again as soon as they are answered, on a server that runs rounds in step."""
    random = np.random.default_rng(seed)
    lengths = np.random.default_rng(1).integers(num_tokens // 2, num_tokens * 2, size=100_000)
    records: list[RequestRecord] = []
    scrapes: list[tuple[float, dict[str, float]]] = []
    count = _Counters(speed)
    for phase, num_users in enumerate(users):
        begins, now_s, index = phase * seconds, phase * seconds, 0
        free_s = [now_s] * num_users
        active: list[list[Any]] = []
        while now_s < begins + seconds or active:
            for at in [s for s in free_s if s <= now_s and s < begins + seconds]:
                free_s.remove(at)
                active.append([at, index, int(lengths[index]), [], []])
                index += 1
            running, queued = active[:cap], len(active[cap:])
            now_s += speed.round_s(len(running), random)
            for one in running:
                emitted = count.round(one, random)
                one[3].append(now_s)
                one[4].append(min(one[2], (one[4][-1] if one[4] else 0) + emitted))
                if one[4][-1] >= one[2]:
                    records.append(_ended(phase, one, begins + warmup))
                    active.remove(one)
                    free_s.append(now_s)
            if len(scrapes) < now_s:
                scrapes.append((now_s, count.values(len(running), queued)))
    end_s = max(record.end_s for record in records)
    server = {"version": "0.5.23", "model_path": "made-up-135m", "dtype": "float32"}
    state = {
        "effective_max_running_requests_per_dp": cap,
        "specstack": {"plan_hash": f"{speed.budget:08x}"},
    }
    return RawRun(tuple(records), tuple(scrapes), idle_client(end_s), {**server, **state})


def _ended(phase: int, one: list[Any], counts_from_s: float) -> RequestRecord:
    due_s, index, num_tokens, chunk_s, chunk_tokens = one
    rounds = len(chunk_s)
    return answer(
        due_s, phase=phase, index=index, chunk_s=tuple(chunk_s), chunk_tokens=tuple(chunk_tokens),
        output_tokens=num_tokens, end_s=chunk_s[-1], warmup=due_s < counts_from_s,
        num_rounds=rounds, num_correct_drafts=num_tokens - rounds,
    )  # fmt: skip


class _Counters:
    """The metrics of such a server."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._total: dict[str, float] = {}

    def round(self, one: list[Any], random: np.random.Generator) -> int:
        """Emit the tokens of one request's round."""
        budget = self._speed.budget
        right = int((random.random(budget) < 0.6).cumprod().sum()) if budget else 0
        self._add(f'rounds_total{{draft_budget="{budget}",reason="goodput"}}', 1)
        self._add("emitted_tokens_total", right + 1)
        self._add("spec_decode_num_drafts_total", float(budget > 0))
        self._add("spec_decode_num_draft_tokens_total", budget)
        self._add("spec_decode_num_accepted_tokens_total", right)
        for depth in range(budget):
            label = f'{{position="{depth}"}}'
            self._add(f"spec_decode_num_draft_tokens_per_pos_total{label}", 1)
            self._add(f"spec_decode_num_accepted_tokens_per_pos_total{label}", float(right > depth))
        return right + 1

    def values(self, running: int, queued: int) -> dict[str, float]:
        """As a scrape finds them."""
        gauges = {
            "sglang:num_running_reqs": running, "sglang:num_queue_reqs": queued,
            "sglang:token_usage": min(1.0, running / 40),
            "specstack_draft_budget": self._speed.budget,
        }  # fmt: skip
        return {**{f"specstack_{key}": value for key, value in self._total.items()}, **gauges}

    def _add(self, name: str, amount: float) -> None:
        self._total[name] = self._total.get(name, 0.0) + amount
