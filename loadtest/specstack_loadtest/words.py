"""The verdict of a summary in plain words, and how numbers are written for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specstack_loadtest.looks import Summary

DASH = "\u2013"
Estimate = Mapping[str, float | None]
"""Its value, and the low and the high end of its interval."""


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


def amount(value: float | None) -> str:
    """Three digits; no more than that is known of anything here."""
    if value is None:
        return DASH
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size == 0:
        return "0"
    if size < 0.001:
        return f"{value:.1e}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    """A length of time, in seconds from 1 s on."""
    if value is None:
        return DASH
    return f"{amount(value / 1000)} s" if abs(value) >= 1000 else f"{amount(value)} ms"


def signed_ms(value: float | None) -> str:
    """A difference of times."""
    return DASH if value is None else _signed(value) + milliseconds(value)


def percent(value: float | None) -> str:
    """A share."""
    return DASH if value is None else f"{_hundredfold(value)} %"


def _hundredfold(value: float) -> str:
    size = abs(100 * value)
    return f"{100 * value:.{0 if size >= 10 or size == 0 else 1 if size >= 1 else 2}f}"


def _signed(value: float) -> str:
    return "+" if value > 0 else ""


def interval(estimate: Estimate, form: str = "amount") -> str:
    """low to high, in one unit; nothing where there is none.

    Args:
        form: amount, ms, signed_ms or percent.
    """
    low, high = estimate["low"], estimate["high"]
    if low is None or high is None:
        return ""
    if form == "percent":
        return f"{_hundredfold(low)} to {_hundredfold(high)} %"
    if form == "amount":
        return f"{amount(low)} to {amount(high)}"
    in_seconds = max(abs(low), abs(high)) >= 1000
    scale, unit = (1000, "s") if in_seconds else (1, "ms")
    signs = (_signed(low), _signed(high)) if form == "signed_ms" else ("", "")
    return f"{signs[0]}{amount(low / scale)} to {signs[1]}{amount(high / scale)} {unit}"


def with_interval(estimate: Estimate) -> str:
    """An amount and its interval."""
    bounds = interval(estimate)
    return amount(estimate["value"]) + (f" ({bounds})" if bounds else "")


def difference_of(estimate: Estimate, less: str, more: str) -> str:
    """A difference of times in words, with its interval."""
    value, bounds = estimate["value"], interval(estimate, "signed_ms")
    if value is None:
        return ""
    said = f"{milliseconds(abs(value))} {more if value > 0 else less}"
    return f"{said} ({bounds})" if bounds else said


def listed(words: Sequence[str], last: str = "and") -> str:
    """a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


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
    for key, unit in (("users", "users"), ("rate", "requests/s")):
        if len(phases) > 1 and all(phase[key] for phase in phases):
            return f"{listed([format(phase[key], 'g') for phase in phases])} {unit}"
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
        (best, *others) = sorted(results, key=lambda r: -(r["tokens_per_s"]["value"] or 0))
        return f"{best['side']} gives most tokens/s." if others else ""
    baseline = summary["baseline"]
    faster = sorted(
        (c for c in comparisons.values() if c["verdict"] == "faster"), key=_gain, reverse=True
    )
    slower = [c["side"] for c in comparisons.values() if c["verdict"] == "slower"]
    said = []
    if faster:
        what = "gives most tokens/s" if faster[0]["by"] == "tokens_per_s" else "answers soonest"
        said.append(f"{faster[0]['side']} {what}")
    elif all(c["verdict"] == "unknown" for c in comparisons.values()):
        said.append("measured too briefly to say")
    elif any(c["verdict"] == "unknown" for c in comparisons.values()):
        said.append(f"no side is known to be faster than {baseline}")
    else:
        said.append(f"no side is faster than {baseline}")
    if slower:
        said.append(f"{listed(slower)} {'loses' if len(slower) == 1 else 'lose'}")
    return "; ".join(said) + "."


def _gain(comparison: Mapping[str, Any]) -> float:
    if comparison["by"] == "tokens_per_s":
        return float(comparison["tokens_per_s_ratio"]["value"])
    return -float(comparison["paired"]["e2e_ms"]["difference"]["value"])


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
