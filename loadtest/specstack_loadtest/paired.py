"""A side against the baseline in one phase: throughput, latencies of the same requests, verdict.

Requests are paired by identity: both sides were asked the same. Values of several repeats are
averaged per identity first, so that a request counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from specstack_loadtest.cell import LATENCIES, Cell, Measure
from specstack_loadtest.estimates import (
    NOTHING,
    PERCENTS,
    Draws,
    Estimate,
    difference,
    mean,
    rate_ratio,
)
from specstack_loadtest.runs import Part

Verdict = Literal["faster", "same", "slower", "unknown"]

_Identity = tuple[int, int, int]


@dataclass(frozen=True)
class PairedDifference:
    """Of one latency, in seconds: the side's minus the baseline's."""

    pairs: int
    mean: Estimate
    baseline_mean: float | None
    """Of the same requests."""
    of_repeats: tuple[float, ...]
    """The mean within each repeat in which both answered the same requests."""

    def as_data(self) -> dict[str, Any]:
        """The form in summary.json, in milliseconds."""
        of_baseline = None if self.baseline_mean is None else self.baseline_mean * 1e3
        return {
            "pairs": self.pairs,
            "difference": self.mean.as_data(1e3),
            "difference_of_repeats": [seconds * 1e3 for seconds in self.of_repeats],
            "baseline_mean": of_baseline,
        }


def compare(ours: Cell, baseline: Cell) -> dict[str, Any]:
    """All that is said of a side beside the baseline."""
    ratio = rate_ratio(
        ours.tokens, baseline.tokens, (f"{ours.label}/tokens", f"{baseline.label}/tokens")
    )
    paired = {name: paired_difference(ours, baseline, of) for name, of in LATENCIES.items()}
    by = "tokens_per_s" if ours.phase.users is not None else "e2e_ms"
    verdict = (
        judged(ratio, same=1.0)
        if by == "tokens_per_s"
        else judged(_negated(paired["e2e_ms"].mean), same=0.0)
    )
    return {
        "side": ours.side,
        "phase": ours.phase.number,
        "tokens_per_s_ratio": ratio.as_data(),
        "speedup": (ratio if by == "tokens_per_s" else speedup(paired["e2e_ms"])).as_data(),
        "ratio_of_repeats": _ratios(ours, baseline),
        "paired": {name: found.as_data() for name, found in paired.items()},
        "tail": tail(ours, baseline),
        "verdict": verdict,
        "by": by,
    }


def judged(gain: Estimate, same: float) -> Verdict:
    """More is better; `same` within the interval is no difference that can be seen."""
    if gain.low is None or gain.high is None:
        return "unknown"
    return "faster" if gain.low > same else "slower" if gain.high < same else "same"


def speedup(found: PairedDifference) -> Estimate:
    """How many times sooner: the baseline's mean over the side's, of the same requests. The
    interval is the difference's; the baseline's mean is taken as it is.
    """
    base = found.baseline_mean
    if base is None or found.mean.value is None:
        return NOTHING
    ends = (found.mean.value, found.mean.high, found.mean.low)
    return Estimate(*(None if x is None or base + x <= 0 else base / (base + x) for x in ends))


def paired_difference(ours: Cell, baseline: Cell, measure: Measure) -> PairedDifference:
    """Over requests that both answered."""
    here, there = _by_identity(ours.parts, measure), _by_identity(baseline.parts, measure)
    common = sorted(here.keys() & there.keys())
    if not common:
        return PairedDifference(0, NOTHING, None, ())
    conversations = sorted({(phase, index) for phase, index, _ in common})
    number = {conversation: i for i, conversation in enumerate(conversations)}
    found = mean(
        [here[identity] - there[identity] for identity in common],
        [number[identity[:2]] for identity in common],
        Draws(len(conversations), f"{ours.label}/{baseline.label}"),
    )
    of_baseline = sum(there[identity] for identity in common) / len(common)
    return PairedDifference(
        len(common), found, of_baseline, tuple(_differences(ours, baseline, measure))
    )


def tail(ours: Cell, baseline: Cell) -> dict[str, Any] | None:
    """The highest percentile that both have, of each latency; None: neither has any."""
    for percent in sorted(PERCENTS, reverse=True):
        found = {
            name: difference(ours.latencies[name], baseline.latencies[name], percent)
            for name in LATENCIES
        }
        if found["e2e_ms"].value is not None:
            return {
                "percent": percent,
                **{
                    name: {
                        "side": _ms(ours.latencies[name].percentiles[percent].value),
                        "baseline": _ms(baseline.latencies[name].percentiles[percent].value),
                        "difference": estimate.as_data(1e3),
                    }
                    for name, estimate in found.items()
                },
            }
    return None


def _ratios(ours: Cell, baseline: Cell) -> list[float]:
    """Of the throughput of the same repeat, for those that both have."""
    return [
        one.tokens().rate / rate
        for one, other in _repeats_of_both(ours, baseline)
        if (rate := other.tokens().rate) > 0
    ]


def _differences(ours: Cell, baseline: Cell, measure: Measure) -> Iterator[float]:
    """Means over the same requests of the same repeat, for those that both have."""
    for one, other in _repeats_of_both(ours, baseline):
        here, there = _by_identity([one], measure), _by_identity([other], measure)
        common = sorted(here.keys() & there.keys())
        if common:
            yield sum(here[identity] - there[identity] for identity in common) / len(common)


def _repeats_of_both(ours: Cell, baseline: Cell) -> list[tuple[Part, Part]]:
    there = {part.run.repeat: part for part in baseline.parts}
    return [(part, there[part.run.repeat]) for part in ours.parts if part.run.repeat in there]


def _by_identity(parts: Iterable[Part], measure: Measure) -> dict[_Identity, float]:
    """Of whole answers; of those of several repeats, the mean."""
    values: dict[_Identity, list[float]] = defaultdict(list)
    for record in (record for part in parts for record in part.records if record.error is None):
        value = measure(record)
        if value is not None:
            values[record.identity].append(value)
    return {identity: sum(found) / len(found) for identity, found in values.items()}


def _negated(estimate: Estimate) -> Estimate:
    turned = [None if x is None else -x for x in (estimate.value, estimate.high, estimate.low)]
    return Estimate(*turned)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
