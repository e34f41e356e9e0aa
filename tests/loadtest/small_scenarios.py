"""Scenario files for tests: short prompts, short answers, whatever load is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from specstack_loadtest.records import RequestRecord, read_records
from specstack_loadtest.workload import Turn


def write_scenario(
    folder: Path,
    arrivals: dict[str, Any],
    stop: dict[str, Any],
    *,
    max_tokens: int = 6,
    num_prompts: int = 50,
    workload: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a scenario and its prompts; `more` are sections of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"prompt": f"What is {n} times {n}?"}) for n in range(num_prompts))
    (folder / "prompts.jsonl").write_text("".join(line + "\n" for line in lines))
    data = {
        "version": 1,
        "arrivals": arrivals,
        "workload": {
            "prompts": ["prompts.jsonl"], "output_tokens": max_tokens, **(workload or {}),
        },
        "stop": stop,
        "timeout_s": 20,
        **more,
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def records_of(folder: Path) -> list[RequestRecord]:
    """What a run left."""
    return list(read_records(folder / "requests.jsonl"))


def most_in_flight(records: Iterable[RequestRecord]) -> int:
    """How many requests were sent and not ended, at most."""
    steps = [(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def turn(**changes: Any) -> Turn:
    """A turn to send."""
    fields: dict[str, Any] = {
        "messages": ({"role": "user", "content": "What is 2 times 2?"},),
        "max_tokens": 6, "temperature": 0.0, "seed": 1, "response_format": None,
        "exact_output": False, "think_s": 0.0,
    }  # fmt: skip
    return Turn(**{**fields, **changes})
