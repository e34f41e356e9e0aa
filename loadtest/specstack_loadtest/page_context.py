"""What the templates of the report are filled with, beyond the summary itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specstack_loadtest.folder import Manifest
from specstack_loadtest.looks import MEASURES, Summary
from specstack_loadtest.words import listed, milliseconds, percent

PERCENTILES = ("p50", "p90", "p95", "p99")
MEASURE_NAMES = {key: name[0].upper() + name[1:] for key, name in MEASURES.items()}
EXPLAINED = {
    "ttft_ms": "To the first chunk with text.",
    "tpot_ms": "From the first chunk to the last one, over the tokens after the first: how fast an"
    " answer goes on, as one number per answer.",
    "itl_ms": "Between two chunks of an answer, as a reader sees them: a chunk of a speculative"
    " round holds several tokens, so gaps are longer and fewer.",
    "e2e_ms": "To the end of the answer.",
}
PAIRED = ("ttft_ms", "tpot_ms", "e2e_ms")
_DARKEST = (12, 40, 84)
_LIGHTEST = (50, 113, 176)
_PLAIN = "#646d78"


def context_of(summary: Summary, manifest: Manifest) -> dict[str, Any]:
    """Names that the templates use."""
    results = summary["results"]
    by_phase: dict[int, list[Any]] = {}
    for result in results:
        by_phase.setdefault(result["phase"], []).append(result)
    return {
        "by_phase": by_phase,
        "comparisons": {(c["side"], c["phase"]): c for c in summary["comparisons"]},
        "measures": MEASURE_NAMES,
        "explained": EXPLAINED,
        "paired_measures": PAIRED,
        "percentiles": PERCENTILES,
        "is_open": summary["scenario"]["kind"] != "closed",
        "client_words": _client(summary),
        "has_slo": any(r["good"] for r in results),
        "slo_words": _slo(summary),
        "any_cut": any(part["cut"] for r in results for part in r["parts"]),
        "has_acceptance": any(r["acceptance"] or r["budget"] for r in results),
        "budget_rows": list(_budget_rows(summary)),
        "error_rows": list(_error_rows(summary)),
        "warmup_words": _warmup(summary),
        "verdict_words": _verdict(summary),
        "provenance": list(_provenance(summary, manifest)),
        "examples": _examples(summary),
        "thousand": lambda value: None if value is None else 1000 * value,
    }


def _slo(summary: Summary) -> str:
    slo = summary["scenario"]["slo"]
    names = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
    return ", ".join(f"{name} ≤ {slo[key]:g} ms" for name, key in names if slo[key] is not None)


def _budget_rows(summary: Summary) -> Iterator[dict[str, Any]]:
    budgets = [r for r in summary["results"] if r["budget"]]
    most = max((c["draft_budget"] for r in budgets for c in r["budget"]["by_choice"]), default=0)
    for result in sorted(budgets, key=lambda r: r["phase"]):
        choices = sorted(
            result["budget"]["by_choice"], key=lambda c: (c["draft_budget"], c["reason"])
        )
        yield {
            "side": result["side"],
            "load": summary["phases"][result["phase"]]["name"],
            "choices": [
                {
                    "grow": f"{choice['share']:.4f}",
                    "color": _shade(choice["draft_budget"], most),
                    "label": f"{choice['draft_budget']} {choice['reason']}",
                    "title": f"budget {choice['draft_budget']}, {choice['reason']}:"
                    f" {percent(choice['share'])} of {result['budget']['rounds']:.0f} rounds",
                }
                for choice in choices
            ],
        }


def _shade(budget: int, most: int) -> str:
    """Grey for plain decoding, then from light to dark."""
    if budget == 0:
        return _PLAIN
    part = budget / most
    mixed = (round(a + (b - a) * part) for a, b in zip(_LIGHTEST, _DARKEST, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _error_rows(summary: Summary) -> Iterator[dict[str, Any]]:
    for result in summary["results"]:
        for kind, count in result["requests"]["errors"].items():
            load = summary["phases"][result["phase"]]["name"]
            yield {"side": result["side"], "load": load, "kind": kind, "count": count}


def _client(summary: Summary) -> str | None:
    """The client's load in one sentence; None: it could not keep up somewhere, or nobody knows."""
    clients = [r["client"] for r in summary["results"]]
    lags = [c["lag_p99_s"] for c in clients if c["lag_p99_s"] is not None]
    if not lags or any(c["saturated"] for c in clients):
        return None
    late = max((c["late_p99_s"] or 0.0 for c in clients), default=0.0)
    busy = max((c["busy_share"] or 0.0 for c in clients), default=0.0)
    return (
        f"The client kept up at every load: at the 99th percentile it woke {_ms(max(lags))} and"
        f" sent {_ms(late)} too late at most, and its CPU was full for at most {percent(busy)} of"
        " the time."
    )


def _ms(seconds: float) -> str:
    return milliseconds(max(0.0, seconds) * 1000)


def _warmup(summary: Summary) -> str:
    warmup = summary["scenario"]["warmup"]
    if warmup["seconds"]:
        return f"The first {warmup['seconds']:g} s of every load are warm-up and count nowhere."
    if warmup["requests"]:
        return (
            f"The first {warmup['requests']} requests of every load are warm-up and count nowhere."
        )
    return "There is no warm-up: first requests count, with whatever the server does only once."


def _verdict(summary: Summary) -> str:
    if summary["scenario"]["kind"] == "closed":
        return (
            "Faster and slower are said of tokens/s, where the whole interval of the ratio lies on"
            " one side of 1. Users wait for their answers, so a faster server is asked more."
        )
    return (
        "Requests come whatever the server does, so throughput is the load's as long as the server"
        " keeps up. Faster and slower are therefore said of the time to whole answers: where the"
        " whole interval of the mean difference over the same requests lies on one side of 0."
    )


def _provenance(summary: Summary, manifest: Manifest) -> Iterator[tuple[str, str | list[str]]]:
    yield "command", manifest.command
    yield "made at", manifest.created_at
    yield "machine", manifest.machine
    yield "commit", manifest.commit or "not known"
    yield "versions", [f"{name} {v}" for name, v in manifest.versions.items() if v]
    yield "scenario", [f"{key}: {value}" for key, value in manifest.scenario.items()]
    yield "seed", f"{summary['scenario']['seed']}"
    yield "client processes", f"{manifest.num_workers}"
    for side, facts in manifest.side_facts.items():
        yield side, [f"{key}: {value}" for key, value in facts.items()] or ["-"]
    for side in summary["sides"]:
        told = {
            f"{k}: {v}"
            for r in summary["runs"]
            if r["side"] == side
            for k, v in r["server"].items()
        }
        if told:
            yield f"{side}, as it says", sorted(told)


def _examples(summary: Summary) -> Any:
    def words(found: Mapping[str, Any]) -> str:
        phases = summary["phases"]
        return listed(
            [f"{phases[p]['name']} #{index}" + (f" turn {turn + 1}" if turn else "")
             for p, index, turn in found["examples"]]
        )  # fmt: skip

    return words
