"""The verdict of a summary in plain words: over all loads, and at each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from specstack_loadtest.looks import Summary
from specstack_loadtest.words import (
    Estimate,
    amount,
    difference_of,
    listed,
    load_unit,
    milliseconds,
    with_interval,
)


@dataclass(frozen=True)
class SideLine:
    """What is said of one side at one load."""

    side: str
    verdict: str
    """faster, same, slower, unknown; `baseline`; `alone`: there is nothing to compare it with."""
    main: str
    """Throughput; in an open loop, how long answers take."""
    tail: str


@dataclass(frozen=True)
class LoadVerdict:
    """What is said of one load."""

    load: str
    headline: str
    lines: tuple[SideLine, ...]


def conclusions(summary: Summary) -> list[tuple[str, str]]:
    """(side, what is said of it over all loads), the best first; empty without a baseline."""
    found = []
    for side in summary["sides"]:
        own = [c for c in summary["comparisons"] if c["side"] == side]
        if own:
            found.append((_rank(own), side, _conclusion(summary, own)))
    return [(side, words) for _, side, words in sorted(found, key=lambda one: one[0])]


def _rank(comparisons: Sequence[Mapping[str, Any]]) -> tuple[bool, int, int]:
    """Those of which something is known first, then the seldom slower, then the often faster."""
    verdicts = [c["verdict"] for c in comparisons]
    is_unknown = all(verdict == "unknown" for verdict in verdicts)
    return is_unknown, verdicts.count("slower"), -verdicts.count("faster")


def _conclusion(summary: Summary, comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Every load is accounted for: what holds for all is said only where all are known."""
    baseline, num = summary["baseline"], len(summary["phases"])
    known = sum(c["verdict"] != "unknown" for c in comparisons)
    compared = {c["phase"] for c in comparisons}
    left_out = [phase for phase in summary["phases"] if phase["number"] not in compared]
    said = []
    for verdict, words in (
        ("faster", f"faster than {baseline}"),
        ("same", "the same within noise"),
        ("slower", "slower"),
        ("unknown", "measured too briefly to say"),
    ):
        phases = [summary["phases"][c["phase"]] for c in comparisons if c["verdict"] == verdict]
        if phases:
            every = len(phases) == num > 1
            said.append(f"{words} at {'every load' if every else loads(phases)}")
        elif verdict == "slower" and len(said) > 1:
            said.append("never slower" if known == num else f"not slower at {known} of {num} loads")
    if left_out:
        said.append(f"not compared at {len(left_out)} of {num} loads ({loads(left_out)})")
    return "; ".join(said) + "." + _range_of_ratios(summary, comparisons)


def _range_of_ratios(summary: Summary, comparisons: Sequence[Mapping[str, Any]]) -> str:
    """From the first load to the last one."""
    first, *_, last = [*comparisons[:1], *comparisons]
    is_known = "unknown" not in (first["verdict"], last["verdict"])
    if first is last or first["by"] != "tokens_per_s" or not is_known:
        return ""
    ratios = [amount(c["tokens_per_s_ratio"]["value"]) for c in (first, last)]
    names = [summary["phases"][c["phase"]]["name"] for c in (first, last)]
    return f" {ratios[0]} times its tokens/s at {names[0]}, {ratios[1]} times at {names[1]}."


def loads(phases: Sequence[Mapping[str, Any]]) -> str:
    """Their names; of those that are numbers of one kind, the unit once."""
    for key in ("users", "rate"):
        if len(phases) > 1 and all(phase[key] for phase in phases):
            return f"{listed([format(phase[key], 'g') for phase in phases])} {load_unit(phases)}"
    return listed([phase["name"] for phase in phases])


def verdicts(summary: Summary) -> list[LoadVerdict]:
    """One per phase that has numbers."""
    found = []
    for phase in summary["phases"]:
        results = [r for r in summary["results"] if r["phase"] == phase["number"]]
        if results:
            comparisons = {
                c["side"]: c for c in summary["comparisons"] if c["phase"] == phase["number"]
            }
            lines = [
                _line(result, comparisons.get(result["side"]), summary["baseline"])
                for result in results
            ]
            headline = _headline(summary, results, comparisons)
            found.append(LoadVerdict(phase["name"], headline, tuple(lines)))
    return found


def _headline(
    summary: Summary,
    results: Sequence[Mapping[str, Any]],
    comparisons: Mapping[str, Mapping[str, Any]],
) -> str:
    if not comparisons:
        return _headline_alone(summary, results)
    baseline = summary["baseline"]
    faster = {side: c for side, c in comparisons.items() if c["verdict"] == "faster"}
    slower = [side for side, c in comparisons.items() if c["verdict"] == "slower"]
    best = _best({side: _gain(c) for side, c in faster.items()})
    said = []
    if len(best) == 1:
        said.append(f"{best[0]} {_LEADS[faster[best[0]]['by']]}")
    elif best:
        said.append(f"{listed(best)} are faster than {baseline} and the same within noise")
    elif all(c["verdict"] == "unknown" for c in comparisons.values()):
        said.append("measured too briefly to say")
    elif any(c["verdict"] == "unknown" for c in comparisons.values()):
        said.append(f"no side is known to be faster than {baseline}")
    else:
        said.append(f"no side is faster than {baseline}")
    if slower:
        said.append(f"{listed(slower)} {'loses' if len(slower) == 1 else 'lose'}")
    return "; ".join(said) + "."


_LEADS = {"tokens_per_s": "gives most tokens/s", "e2e_ms": "answers soonest"}
"""What is said of the best side, by what it is best in."""


def _headline_alone(summary: Summary, results: Sequence[Mapping[str, Any]]) -> str:
    """Of sides without a baseline; throughput of an open loop is the load's own."""
    if len(results) < 2:
        return ""
    is_open = summary["phases"][results[0]["phase"]]["users"] is None
    gains = {
        r["side"]: _negated(r["e2e_ms"]["mean"]) if is_open else r["tokens_per_s"] for r in results
    }
    if any(gain["low"] is None for gain in gains.values()):
        return "measured too briefly to say."
    best = _best(gains)
    if len(best) == 1:
        return f"{best[0]} {_LEADS['e2e_ms' if is_open else 'tokens_per_s']}."
    others = [side for side in gains if side not in best]
    said = f"{listed(best)} are the same within noise"
    return f"{said}, ahead of {listed(others)}." if others else f"{said}."


def _gain(comparison: Mapping[str, Any]) -> Estimate:
    """What its verdict is by, more being better."""
    if comparison["by"] == "tokens_per_s":
        return cast(Estimate, comparison["tokens_per_s_ratio"])
    return _negated(comparison["paired"]["e2e_ms"]["difference"])


def _negated(estimate: Estimate) -> dict[str, float | None]:
    ends = (("value", "value"), ("low", "high"), ("high", "low"))
    return {name: None if (x := estimate[of]) is None else -x for name, of in ends}


def _best(gains: Mapping[str, Estimate]) -> list[str]:
    """The sides with the greatest gain, as far as intervals tell, the greatest first."""

    def end(side: str, name: str) -> float:
        found = gains[side][name]
        assert found is not None, f"{side} has no interval"
        return found

    sides = sorted(gains, key=lambda side: end(side, "value"), reverse=True)
    return [side for side in sides if end(side, "high") >= end(sides[0], "low")]


def _line(
    result: Mapping[str, Any],
    comparison: Mapping[str, Any] | None,
    baseline: str | None,
) -> SideLine:
    is_baseline = result["side"] == baseline
    verdict = "baseline" if is_baseline else "alone"
    if comparison is not None:
        verdict = str(comparison["verdict"])
    main = list(_main(result, comparison, baseline))
    return SideLine(result["side"], verdict, "; ".join(main), _tail(result, comparison))


def _main(
    result: Mapping[str, Any],
    comparison: Mapping[str, Any] | None,
    baseline: str | None,
) -> Iterator[str]:
    yield f"{with_interval(result['tokens_per_s'])} tokens/s"
    if comparison is None:
        return
    if comparison["by"] == "tokens_per_s":
        yield f"{with_interval(comparison['tokens_per_s_ratio'])} times {baseline}"
        return
    paired = comparison["paired"]["e2e_ms"]
    if paired["pairs"]:
        said = difference_of(paired["difference"], "sooner", "later")
        yield f"the same requests are answered {said}, of {milliseconds(paired['baseline_mean'])}"


def _tail(result: Mapping[str, Any], comparison: Mapping[str, Any] | None) -> str:
    """End to end at the highest percentile that is known."""
    if comparison is not None and comparison["tail"] is not None:
        name, found = f"p{comparison['tail']['percent']}", comparison["tail"]["e2e_ms"]
        less_or_more = difference_of(found["difference"], "less", "more")
        return f"{name} {milliseconds(found['side'])}, {less_or_more}"
    for name in ("p99", "p95", "p90", "p50"):
        if result["e2e_ms"][name]["value"] is not None:
            return f"{name} {milliseconds(result['e2e_ms'][name]['value'])}"
    return "too few answers"
