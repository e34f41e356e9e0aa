"""Counts to measures, with 95 % intervals by a bootstrap over sequences. No torch.

Rounds of one sequence resemble each other, so sequences are drawn, not rounds (Efron 1979; the
percentile interval). The accept length is 1 + sum over k of alpha_1 .. alpha_k: the mean of emitted
tokens per round (bonus included) of a text that does not end. Letters: R draws, K depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specstack.evaluation.tallies import Q_EDGES, Counts, Floats, Reliability

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number and its interval; none for a single sequence or where nothing was counted."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def as_data(self) -> dict[str, float | None]:
        """The form in report.json."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class DrafterMeasures:
    """Of one drafter of a merge. A draft that several proposed counts for each."""

    num_drafts: int
    num_right: int
    accept_rate: Estimate
    share: Estimate
    """Its part of all right drafts; the shares of a merge may add up to more than 1."""

    def as_data(self) -> dict[str, Any]:
        """The form in report.json."""
        return {
            "drafts": self.num_drafts,
            "right": self.num_right,
            "accept_rate": self.accept_rate.as_data(),
            "share_of_right": self.share.as_data(),
        }


@dataclass(frozen=True)
class Measures:
    """Of one configuration on one set of sequences."""

    num_sequences: int
    num_rounds: int
    accept_length: Estimate
    """Bonus included."""
    as_served: Estimate
    """Emitted tokens per round where the end of a text cuts its last round short."""
    accept_rate: Estimate
    """Right drafts among the proposed ones; the bonus is none."""
    drafts_per_round: float | None
    alphas: tuple[Estimate, ...]
    """P(depth k right, given depth k - 1 right), k = 1, 2, .."""
    num_reached: tuple[int, ...]
    """Rounds behind each."""
    survival: tuple[float, ...]
    """P(depth k right): its share of all rounds."""
    retention: Estimate
    """The last alpha over the first."""
    drafters: Mapping[str, DrafterMeasures]
    """Of a merge, in its order."""

    def as_data(self) -> dict[str, Any]:
        """The form in report.json."""
        return {
            "sequences": self.num_sequences,
            "rounds": self.num_rounds,
            "accept_length": self.accept_length.as_data(),
            "as_served": self.as_served.as_data(),
            "accept_rate": self.accept_rate.as_data(),
            "drafts_per_round": self.drafts_per_round,
            "alphas": [alpha.as_data() for alpha in self.alphas],
            "reached": list(self.num_reached),
            "survival": list(self.survival),
            "retention": self.retention.as_data(),
            "drafters": {name: d.as_data() for name, d in self.drafters.items()},
        }


def alphas_of(counts: Counts) -> Floats:
    """[.., K]; 0 where nothing was reached."""
    return np.divide(
        counts.right, counts.reached, out=np.zeros_like(counts.right), where=counts.reached > 0
    )


def accept_length_of(counts: Counts) -> Floats:
    """[..]; see the head of this file."""
    length: Floats = 1 + np.cumprod(alphas_of(counts), axis=-1).sum(axis=-1)
    return np.where(counts.rounds > 0, length, np.nan)


def bootstrap_weights(num_sequences: int, num_draws: int, seed: int) -> Floats:
    """[R, S]: how often each draw of S sequences took each of them."""
    random = np.random.default_rng(seed)
    share = np.full(num_sequences, 1 / num_sequences)
    return random.multinomial(num_sequences, share, size=num_draws).astype(np.float64)


class Estimator:
    """Turns statistics of counts into estimates: one set of draws for all of them."""

    def __init__(self, counts: Counts, *, num_draws: int, seed: int) -> None:
        # Sequences without a round, such as those outside a range of lengths, are not drawn.
        counts = counts.weighted(np.eye(len(counts.rounds))[counts.rounds > 0])
        self.counts = counts
        self.num_sequences = len(counts.rounds)
        self._draws: Counts | None = None
        if self.num_sequences > 1:
            self._draws = counts.weighted(bootstrap_weights(self.num_sequences, num_draws, seed))

    def __call__(self, statistic: Callable[[Counts], Floats]) -> Estimate:
        """Estimate a number; NaN is none."""
        value = float(statistic(self.counts.total))
        if np.isnan(value):
            return Estimate(None)
        if self._draws is None:
            return Estimate(value)
        return _with_interval(Estimate(value), statistic(self._draws))


def _with_interval(estimate: Estimate, draws: Floats) -> Estimate:
    """The percentile interval; draws in which there was nothing to count are left out."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(draws[~np.isnan(draws)], [tail, 1 - tail])
    return Estimate(estimate.value, float(low), float(high))


def measure(counts: Counts, *, num_draws: int, seed: int, drafters: Sequence[str] = ()) -> Measures:
    """All measures of some sequences.

    Args:
        drafters: names of a merge's drafters.
    """
    estimate = Estimator(counts, num_draws=num_draws, seed=seed)
    total = estimate.counts.total
    max_depth = total.right.shape[-1]
    return Measures(
        num_sequences=estimate.num_sequences,
        num_rounds=int(total.rounds),
        accept_length=estimate(accept_length_of),
        as_served=estimate(lambda c: _ratio(c.emitted, c.rounds)),
        accept_rate=estimate(lambda c: _ratio(c.correct, c.drafts)),
        drafts_per_round=float(total.drafts / total.rounds) if total.rounds else None,
        alphas=tuple(
            estimate(lambda c, k=k: _ratio(c.right[..., k], c.reached[..., k]))  # type: ignore[misc]
            for k in range(max_depth)
        ),
        num_reached=tuple(int(n) for n in total.reached),
        survival=tuple(np.cumprod(alphas_of(total)).tolist()),
        retention=estimate(_retention),
        drafters={name: _of_drafter(estimate, i) for i, name in enumerate(drafters)},
    )


def _of_drafter(estimate: Estimator, i: int) -> DrafterMeasures:
    total = estimate.counts.total
    return DrafterMeasures(
        num_drafts=int(total.drafts_per_drafter[i]),
        num_right=int(total.correct_per_drafter[i]),
        accept_rate=estimate(
            lambda c: _ratio(c.correct_per_drafter[..., i], c.drafts_per_drafter[..., i])
        ),
        share=estimate(lambda c: _ratio(c.correct_per_drafter[..., i], c.correct)),
    )


def _retention(counts: Counts) -> Floats:
    alphas = _ratio(counts.right, counts.reached)
    return _ratio(alphas[..., -1], alphas[..., 0])


def _ratio(above: Floats, below: Floats) -> Floats:
    """NaN where there is nothing below."""
    ratio: Floats = np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0)
    return ratio


@dataclass(frozen=True)
class ReliabilityBin:
    """Drafts whose path the drafter gave a probability in [low, high)."""

    low: float
    high: float
    num_drafts: int
    mean_q: float
    right: Estimate
    """Their share that was right."""


def reliability(
    found: Reliability, *, num_draws: int, seed: int
) -> tuple[list[ReliabilityBin], float | None]:
    """The bins that hold drafts, and the mean distance between q and the share that was right."""
    drafts, sum_q, right = (x.sum(axis=0) for x in (found.drafts, found.sum_q, found.right))
    weights = bootstrap_weights(len(found.drafts), num_draws, seed)
    shares = _ratio(weights @ found.right, weights @ found.drafts)  # [R, Q]
    bins = []
    for i in np.flatnonzero(drafts):
        share = Estimate(float(right[i] / drafts[i]))
        if len(found.drafts) > 1:
            share = _with_interval(share, shares[:, i])
        bins.append(
            ReliabilityBin(
                Q_EDGES[i], Q_EDGES[i + 1], int(drafts[i]), float(sum_q[i] / drafts[i]), share
            )
        )
    if not bins:
        return [], None
    return bins, float(np.abs(sum_q - right).sum() / drafts.sum())
