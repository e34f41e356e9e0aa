"""What the server says of a side in a phase: load, acceptance, budgets, prefix cache.

Accept lengths count the bonus token. Shares of positions are of the request rounds that verified at
least one draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specstack_loadtest import answers
from specstack_loadtest.cell import Cell
from specstack_loadtest.server_identity import admission_cap
from specstack_loadtest.server_metrics import GAUGES, summed

PER_POSITION = (
    "spec_decode_num_draft_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)


def server_load(cell: Cell) -> dict[str, Any]:
    """Running, waiting and KV use over the scrapes of all repeats; None: not exported."""
    found: dict[str, Any] = {}
    for what in GAUGES:
        values = [value for metrics in cell.metrics for _, value in metrics.gauge(what)]
        found[what] = (
            {"mean": float(np.mean(values)), "max": max(values), "scrapes": len(values)}
            if values
            else None
        )
    retracted = [metrics.retracted() for metrics in cell.metrics]
    known = [number for number in retracted if number is not None]
    found["retracted"] = sum(known) if known else None
    found["cap"] = admission_cap_of(cell)
    return found


def admission_cap_of(cell: Cell) -> int | None:
    """The lowest that a repeat's server had."""
    caps = [admission_cap(part.run.server) for part in cell.parts]
    return min((cap for cap in caps if cap is not None), default=None)


def acceptance(cell: Cell) -> dict[str, Any] | None:
    """How much of the drafts was right; None: the server does not say, or drafted nothing."""
    counted, per_request = _counted(cell), _per_request(cell)
    if counted is None and per_request is None:
        return None
    return {"bonus_included": True, "counters": counted, "per_request": per_request}


def _counted(cell: Cell) -> dict[str, Any] | None:
    """From the counters that the server exports."""
    drafting = _total(cell, "spec_decode_num_drafts_total")
    drafts = _total(cell, "spec_decode_num_draft_tokens_total")
    right = _total(cell, "spec_decode_num_accepted_tokens_total")
    if not drafting or drafts is None or right is None:
        return None
    return {
        "drafting_rounds": drafting,
        "accept_length": 1 + right / drafting,
        "accept_rate": right / drafts if drafts else None,
        "drafts_per_round": drafts / drafting,
        "positions": _positions(cell, drafting),
    }


def _positions(cell: Cell, drafting: float) -> list[dict[str, Any]]:
    """Per depth: verified drafts and right ones per drafting round, and alpha."""
    verified, right = (_by_position(cell, name) for name in PER_POSITION)
    found = []
    before = drafting
    for position in sorted(right):
        found.append(
            {
                "depth": position + 1,
                "verified": verified[position] / drafting if position in verified else None,
                "right": right[position] / drafting,
                "alpha": right[position] / before if before else None,
            }
        )
        before = right[position]
    return found


def _by_position(cell: Cell, name: str) -> dict[int, float]:
    found = summed(m.own_increase(name, ("position",)) for m in cell.metrics) or {}
    return {int(position): value for (position,), value in found.items() if position.isdigit()}


def _per_request(cell: Cell) -> dict[str, Any] | None:
    """From what the server says with each answer, over all rounds of the request."""
    told = [
        record
        for _, record in cell.answered()
        if record.num_rounds and record.num_correct_drafts is not None
    ]
    if not told:
        return None
    rounds = sum(record.num_rounds or 0 for record in told)
    right = sum(record.num_correct_drafts or 0 for record in told)
    return {
        "rounds": rounds,
        "accept_length": 1 + right / rounds,
        "distribution": cell.of_requests(answers.accept_length).as_data(),
        "rounds_by_right_drafts": _histogram([r.correct_drafts_histogram for r in told]),
    }


def _histogram(found: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, found), default=0)
    return [sum(one[k] for one in found if k < len(one)) for k in range(longest)]


def budgets(cell: Cell) -> dict[str, Any] | None:
    """Rounds by draft budget and reason; None: the server exports none."""
    found = summed(m.own_increase("rounds_total", ("draft_budget", "reason")) for m in cell.metrics)
    if not found or not sum(found.values()):
        return None
    total = sum(found.values())
    rows: list[dict[str, Any]] = [
        {
            "draft_budget": int(float(budget)),
            "reason": reason,
            "rounds": rounds,
            "share": rounds / total,
        }
        for (budget, reason), rounds in sorted(found.items(), key=lambda item: -item[1])
        if rounds
    ]
    mean = sum(row["draft_budget"] * row["share"] for row in rows)
    plain = sum(row["share"] for row in rows if row["draft_budget"] == 0)
    return {"rounds": total, "mean": mean, "plain_share": plain, "by_choice": rows}


def prefix_cache(cell: Cell) -> dict[str, Any] | None:
    """Share of prompt tokens that were in the prefix cache; None: nobody says."""
    told = [
        (record.cached_tokens, record.prompt_tokens)
        for _, record in cell.answered()
        if record.cached_tokens is not None and record.prompt_tokens is not None
    ]
    if told:
        cached, prompt = (float(sum(column)) for column in zip(*told, strict=True))
        return _hits(cached, prompt, "answers")
    found = summed(m.own_increase("prompt_tokens_total", ("source",)) for m in cell.metrics)
    if found is None or not {("cache",), ("computed",)} & found.keys():
        return None  # an engine's own counter of that name does not tell them apart
    return _hits(found.get(("cache",), 0.0), sum(found.values()), "counters")


def _hits(cached: float, prompt: float, source: str) -> dict[str, Any]:
    return {
        "cached_tokens": cached,
        "prompt_tokens": prompt,
        "share": cached / prompt if prompt else None,
        "source": source,
    }


def _total(cell: Cell, name: str) -> float | None:
    found = summed(metrics.own_increase(name) for metrics in cell.metrics)
    return None if found is None else sum(found.values())
