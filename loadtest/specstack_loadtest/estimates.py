"""Percentiles, means, rates and their ratios with 95 % intervals, by a bootstrap over groups.

Values of one group (the turns of a conversation, the gaps within an answer, the tokens of a stretch
of time) resemble each other, so groups are drawn, not values. The interval is the expanded
percentile interval (Hesterberg, What Teachers Should Know About the Bootstrap, 2015): the plain one
is too narrow where groups are few. What there are too few values for is None, never a guess.
Letters: R draws, G groups, C cells.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVEL = 0.95
PERCENTS = (50, 90, 95, 99)
NUM_DRAWS = 2000
MIN_GROUPS = 5
"""Fewer have no interval."""
MIN_BEYOND = 5
"""Groups that must lie at a percentile or beyond it, on either side, for it to have an interval:
with fewer, the largest value of all may well be smaller than the percentile (p99: 400 of them)."""
MAX_CELLS = 1000
MAX_CURVE = 200
_GROUPS_AT_ONCE = 2048
_DRAWN_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class Estimate:
    """A number and its interval; None where there is too little to say it."""

    value: float | None = None
    low: float | None = None
    high: float | None = None

    def as_data(self, scale: float = 1.0) -> dict[str, float | None]:
        """The form in summary.json, in another unit."""
        items = (("value", self.value), ("low", self.low), ("high", self.high))
        return {name: None if x is None else x * scale for name, x in items}


NOTHING = Estimate()


@dataclass(frozen=True)
class Distribution:
    """What is known of a set of values."""

    count: int
    num_groups: int
    mean: Estimate
    percentiles: Mapping[int, Estimate]
    """By percent; a percentile that no value is expected beyond is None."""
    max: float | None
    curve: tuple[float, ...]
    """Values at equal steps of their share, ending with the largest: an ECDF to draw."""
    draws: Mapping[int, Floats] = field(repr=False, compare=False, default_factory=dict)
    """What the draws of groups made of each percentile, [R]."""

    def as_data(self, scale: float = 1.0) -> dict[str, Any]:
        """The form in summary.json, without the curve."""
        return {
            "count": self.count,
            "conversations": self.num_groups,
            "mean": self.mean.as_data(scale),
            **{f"p{percent}": e.as_data(scale) for percent, e in self.percentiles.items()},
            "max": None if self.max is None else self.max * scale,
        }


class Draws:
    """Groups drawn with replacement, so many times: the same draws for all that is asked of it."""

    def __init__(self, num_groups: int, label: str, num_draws: int = NUM_DRAWS) -> None:
        """Args: label: seeds them; equal labels give equal draws."""
        self.num_groups = num_groups
        random = np.random.default_rng(zlib.crc32(label.encode()))
        self._taken = np.zeros((num_draws, num_groups), np.uint8)  # [R, G]
        num_rows = max(1, _DRAWN_AT_ONCE // num_groups)
        for start in range(0, num_draws, num_rows):
            rows = self._taken[start : start + num_rows]
            drawn = random.integers(0, num_groups, size=rows.shape)
            drawn += np.arange(len(rows))[:, None] * num_groups
            rows[:] = np.bincount(drawn.ravel(), minlength=rows.size).reshape(rows.shape)

    def sums(self, per_group: Floats) -> Floats:
        """Sum amounts [G] over the groups of each draw, [R]."""
        return self._summed(lambda part: per_group[part, None])[:, 0]

    def counts(self, groups: Ints, cells: Ints, num_cells: int) -> Floats:
        """Count the members of cells in each draw, [R, C]; `groups` ascend."""

        def members(part: slice) -> Floats:
            first, last = np.searchsorted(groups, [part.start, part.stop])
            num_groups = min(part.stop, self.num_groups) - part.start
            place = (groups[first:last] - part.start) * num_cells + cells[first:last]
            found = np.bincount(place, minlength=num_groups * num_cells)
            return found.reshape(num_groups, num_cells).astype(np.float64)

        return self._summed(members)

    def _summed(self, amounts: Callable[[slice], Floats]) -> Floats:
        """In parts, so that memory does not grow with the number of groups."""
        total: Floats | None = None
        for start in range(0, self.num_groups, _GROUPS_AT_ONCE):
            part = slice(start, start + _GROUPS_AT_ONCE)
            summed = self._taken[:, part].astype(np.float64) @ amounts(part)
            total = summed if total is None else total + summed
        assert total is not None, "no groups to draw from"
        return total


def percentile(ascending: Floats, percent: int) -> float | None:
    """The smallest value that `percent` % of all do not exceed; None if none is to be expected
    beyond it: p99 needs 100 values.
    """
    count = len(ascending)
    if count * (100 - percent) < 100:
        return None
    return float(ascending[_rank(count, percent) - 1])


def _rank(count: int, percent: int) -> int:
    return -(-count * percent // 100)


def distribution(values: ArrayLike, groups: ArrayLike, draws: Draws) -> Distribution:
    """Describe values.

    Args:
        values: in any order.
        groups: of each value, below `draws.num_groups`.
    """
    found, of_group = np.asarray(values, np.float64), np.asarray(groups, np.int64)
    if not len(found):
        return Distribution(0, 0, NOTHING, dict.fromkeys(PERCENTS, NOTHING), None, ())
    order = np.argsort(found, kind="stable")
    found, of_group = found[order], of_group[order]
    redrawn = _redrawn_percentiles(found, of_group, draws)
    return Distribution(
        count=len(found),
        num_groups=len(np.unique(of_group)),
        mean=mean(found, of_group, draws),
        percentiles={p: _estimated(found, of_group, p, redrawn[p]) for p in PERCENTS},
        max=float(found[-1]),
        curve=_curve(found),
        draws=redrawn,
    )


def _estimated(ascending: Floats, groups: Ints, percent: int, redrawn: Floats) -> Estimate:
    value = percentile(ascending, percent)
    if value is None:
        return NOTHING
    rank = _rank(len(ascending), percent)
    beyond = min(len(np.unique(groups[rank - 1 :])), len(np.unique(groups[:rank])))
    if beyond < MIN_BEYOND:
        return Estimate(value)
    return _with_interval(value, redrawn, len(np.unique(groups)))


def _redrawn_percentiles(ascending: Floats, groups: Ints, draws: Draws) -> dict[int, Floats]:
    """The percentiles of each draw, [R] each: exact up to `MAX_CELLS` values, then to a cell."""
    count = len(ascending)
    num_cells = min(count, MAX_CELLS)
    cells = np.arange(count) * num_cells // count
    last_of_cell = np.append(np.flatnonzero(np.diff(cells)), count - 1)
    by_group = np.argsort(groups, kind="stable")
    below = np.cumsum(draws.counts(groups[by_group], cells[by_group], num_cells), axis=1)
    total = below[:, -1:]
    found = {}
    for percent in PERCENTS:
        at = np.minimum((below * 100 < percent * total).sum(axis=1), num_cells - 1)
        found[percent] = np.where(total[:, 0] > 0, ascending[last_of_cell[at]], np.nan)
    return found


def _curve(ascending: Floats) -> tuple[float, ...]:
    count = len(ascending)
    num = min(count, MAX_CURVE)
    return tuple(float(ascending[-(-count * k // num) - 1]) for k in range(1, num + 1))


def mean(values: ArrayLike, groups: ArrayLike, draws: Draws) -> Estimate:
    """The mean over all values."""
    found, of_group = np.asarray(values, np.float64), np.asarray(groups, np.int64)
    if not len(found):
        return NOTHING
    sums = np.bincount(of_group, found, minlength=draws.num_groups).astype(np.float64)
    counts = np.bincount(of_group, minlength=draws.num_groups).astype(np.float64)
    redrawn = _ratio(draws.sums(sums), draws.sums(counts))
    return _with_interval(float(found.mean()), redrawn, int((counts > 0).sum()))


def difference(one: Distribution, other: Distribution, percent: int) -> Estimate:
    """A percentile of `one` minus that of `other`, drawn apart from each other."""
    here, there = one.percentiles[percent], other.percentiles[percent]
    if here.value is None or there.value is None:
        return NOTHING
    value = here.value - there.value
    if here.low is None or there.low is None:
        return Estimate(value)
    num_groups = min(one.num_groups, other.num_groups)
    return _with_interval(value, one.draws[percent] - other.draws[percent], num_groups)


@dataclass(frozen=True)
class Stretches:
    """Amounts, and lengths of the stretches of time in which they came."""

    amounts: Floats
    seconds: Floats

    @property
    def rate(self) -> float:
        """Amount per second, over all of them."""
        return float(self.amounts.sum() / self.seconds.sum())

    def redrawn(self, label: str) -> Floats:
        """The rates of draws of stretches, [R]."""
        draws = Draws(len(self.amounts), label)
        return _ratio(draws.sums(self.amounts), draws.sums(self.seconds))


def rate(stretches: Stretches, label: str) -> Estimate:
    """The rate over all stretches. Neighbours are taken to be independent of each other."""
    if not len(stretches.amounts):
        return NOTHING
    return _with_interval(stretches.rate, stretches.redrawn(label), len(stretches.amounts))


def rate_ratio(over: Stretches, under: Stretches, labels: tuple[str, str]) -> Estimate:
    """The rate of one over that of another, drawn apart from each other."""
    if not len(over.amounts) or not len(under.amounts) or under.rate == 0:
        return NOTHING
    redrawn = _ratio(over.redrawn(labels[0]), under.redrawn(labels[1]))
    num = min(len(over.amounts), len(under.amounts))
    return _with_interval(over.rate / under.rate, redrawn, num)


def share(num: int, of: int, independent: int | None = None) -> Estimate:
    """A share with Wilson's interval, which holds at 0 and 1, too.

    Args:
        independent: how many of them are independent of each other. Default: all.
    """
    if not of:
        return NOTHING
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    p, spread = num / of, z * z / (independent or of)
    middle = (p + spread / 2) / (1 + spread)
    reach = math.sqrt(p * (1 - p) * spread + spread * spread / 4) / (1 + spread)
    return Estimate(p, max(0.0, middle - reach), min(1.0, middle + reach))


def _ratio(above: Floats, below: Floats) -> Floats:
    """NaN where there is nothing below."""
    empty = np.full(np.shape(above), np.nan)
    ratio: Floats = np.divide(above, below, out=empty, where=below > 0)
    return ratio


def _with_interval(value: float, redrawn: Floats, num_groups: int) -> Estimate:
    """Draws in which there was nothing to count are left out."""
    redrawn = redrawn[~np.isnan(redrawn)]
    if num_groups < MIN_GROUPS or not len(redrawn):
        return Estimate(value)
    tail = expanded_tail(num_groups)
    low, high = np.quantile(redrawn, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def expanded_tail(num_groups: int) -> float:
    """The share of draws to leave out on either side: less than 2.5 % where groups are few."""
    degrees = num_groups - 1
    t = student_quantile(0.5 + LEVEL / 2, degrees)
    return NormalDist().cdf(-t * math.sqrt(num_groups / degrees))


def student_quantile(share_below: float, degrees: int) -> float:
    """Of Student's t, by the expansion about the normal quantile (Abramowitz, Stegun 26.7.5):
    0.3 % off at 4 degrees of freedom, less beyond.
    """
    z = NormalDist().inv_cdf(share_below)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
