"""Percentiles by their definition; intervals by how often they hold the truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specstack_loadtest.estimates import (
    MAX_CELLS,
    PERCENTS,
    Draws,
    Estimate,
    Stretches,
    difference,
    distribution,
    expanded_tail,
    mean,
    percentile,
    rate,
    rate_ratio,
    share,
    student_quantile,
)

FINITE = st.floats(0, 1e6, allow_nan=False)


@given(st.lists(FINITE, min_size=1, max_size=400), st.sampled_from(PERCENTS))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    found = percentile(np.sort(values), percent)
    if len(values) * (100 - percent) < 100:
        assert found is None
        return
    up_to = [
        v for v in sorted(set(values)) if 100 * sum(x <= v for x in values) >= percent * len(values)
    ]
    assert found == up_to[0]


@pytest.mark.parametrize(("percent", "enough"), [(50, 2), (90, 10), (95, 20), (99, 100)])
def test_a_percentile_needs_a_value_beyond_it(percent: int, enough: int) -> None:
    assert percentile(np.arange(enough, dtype=float), percent) is not None
    assert percentile(np.arange(enough - 1, dtype=float), percent) is None


def test_a_percentile_of_few_values_has_no_interval() -> None:
    for count, is_bounded in [(100, False), (399, False), (400, True)]:
        found = distribution(np.arange(count), np.arange(count), Draws(count, "a")).percentiles[99]
        assert (found.low is not None) == is_bounded
        assert found.value is not None


def test_many_values_of_few_conversations_have_no_interval() -> None:
    """Control of the count: 4,000 gaps, but of four answers."""
    groups = np.arange(4000) % 4
    found = distribution(np.arange(4000), groups, Draws(4, "a"))
    assert found.count == 4000
    assert found.num_groups == 4
    assert found.percentiles[50].value == 1999
    assert all(e.low is None for e in (*found.percentiles.values(), found.mean))


def test_nothing_is_nothing() -> None:
    found = distribution([], [], Draws(1, "a"))
    assert found.count == 0
    assert found.max is None
    assert found.mean == found.percentiles[50] == Estimate()
    assert rate(Stretches(np.zeros(0), np.zeros(0)), "a") == Estimate()
    assert share(0, 0) == Estimate()


def test_a_distribution_of_known_values() -> None:
    found = distribution(np.arange(1, 101)[::-1], np.arange(100), Draws(100, "a"))
    assert [found.percentiles[p].value for p in PERCENTS] == [50, 90, 95, 99]
    assert found.mean.value == 50.5
    assert found.max == 100
    assert found.curve == tuple(range(1, 101))
    assert found.as_data(1000)["p50"]["value"] == 50_000


def test_a_curve_of_many_values_ends_with_the_largest() -> None:
    found = distribution(np.arange(10_000), np.arange(10_000) % 50, Draws(50, "a"))
    assert len(found.curve) == 200
    assert found.curve[-1] == 9999
    assert found.curve[99] == 4999


def test_cells_move_redrawn_percentiles_by_no_more_than_one() -> None:
    """Above so many values, draws are of cells of them."""
    values = np.sort(np.random.default_rng(0).exponential(size=4 * MAX_CELLS))
    groups = np.random.default_rng(1).integers(0, 40, size=len(values))
    redrawn = distribution(values, groups, Draws(40, "a")).draws
    taken = Draws(40, "a")._taken
    for draw in range(20):
        exact = np.repeat(values, taken[draw][groups])
        for percent in PERCENTS:
            place = np.searchsorted(values, [percentile(exact, percent), redrawn[percent][draw]])
            assert abs(int(place[0]) - int(place[1])) <= len(values) // MAX_CELLS


def test_draws_repeat_themselves_and_labels_tell_them_apart() -> None:
    amounts = np.arange(30, dtype=float)
    assert np.array_equal(Draws(30, "a").sums(amounts), Draws(30, "a").sums(amounts))
    assert not np.array_equal(Draws(30, "a").sums(amounts), Draws(30, "b").sums(amounts))
    assert (Draws(30, "a")._taken.sum(axis=1) == 30).all()


def test_draws_in_parts_are_those_of_the_whole() -> None:
    num = 5000  # more than are summed at once
    draws, amounts = Draws(num, "a", num_draws=20), np.arange(num, dtype=float)
    assert draws.sums(amounts) == pytest.approx(draws._taken.astype(float) @ amounts)
    groups = np.arange(num)
    counts = draws.counts(groups, groups % 7, 7)
    assert counts.sum(axis=1) == pytest.approx(np.full(20, num))
    assert counts[:, 3] == pytest.approx(draws._taken[:, 3::7].sum(axis=1))


@pytest.mark.parametrize("degrees", [4, 5, 9, 30, 300])
def test_student_quantiles(degrees: int) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=4e-3)


def test_few_groups_leave_out_fewer_draws() -> None:
    assert expanded_tail(5) < 0.002
    assert expanded_tail(1000) == pytest.approx(0.025, abs=2e-4)


@pytest.mark.parametrize(
    ("num", "of", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1)],
)
def test_shares_as_wilson_published_them(num: int, of: int, low: float, high: float) -> None:
    found = share(num, of)
    assert (found.value, found.low, found.high) == pytest.approx((num / of, low, high), abs=1e-4)


def test_a_share_of_requests_that_hang_together_is_less_certain() -> None:
    apart, together = share(50, 100), share(50, 100, 10)
    assert together.low is not None
    assert apart.low is not None
    assert together.low < apart.low


def coverage(
    truth: float, sample: Callable[[np.random.Generator, str], Estimate], num: int
) -> float:
    """How often the interval of samples holds the truth."""
    random, held = np.random.default_rng(7), 0
    for number in range(num):
        found = sample(random, f"sample {number}")
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    return held / num


NUM = 400
"""Samples per coverage: its own standard deviation is 1.1 points at 95 %."""
FLOOR = 0.915
"""Three of them below it."""


@pytest.mark.parametrize(("count", "floor"), [(6, 0.89), (12, FLOOR), (40, FLOOR)])
def test_the_interval_of_a_mean_holds_it(count: int, floor: float) -> None:
    """Of six groups it is a little too narrow: 93 to 94 %; without the expansion 87 %."""

    def sample(random: np.random.Generator, label: str) -> Estimate:
        values = random.normal(3, 1, size=count)
        return mean(values, np.arange(count), Draws(count, label))

    assert floor <= coverage(3.0, sample, NUM) <= 0.985


@pytest.mark.parametrize(("percent", "count"), [(50, 60), (90, 100), (99, 600)])
def test_the_interval_of_a_percentile_holds_it(percent: int, count: int) -> None:
    truth = float(stats.gamma.ppf(percent / 100, 2))

    def sample(random: np.random.Generator, label: str) -> Estimate:
        values = random.gamma(2, size=count)
        return distribution(values, np.arange(count), Draws(count, label)).percentiles[percent]

    assert coverage(truth, sample, 200) >= 0.90  # 0.95 less three standard deviations


def test_the_interval_of_a_ratio_of_rates_holds_it() -> None:
    """Two repeats of half a minute: a dozen stretches on either side."""

    def sample(random: np.random.Generator, label: str) -> Estimate:
        over, under = (Stretches(random.gamma(25, m, size=12), np.full(12, 5.0)) for m in (44, 40))
        return rate_ratio(over, under, (f"{label} a", f"{label} b"))

    assert FLOOR <= coverage(1.1, sample, NUM) <= 0.985


def grouped(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Thirty conversations of ten values that share most of what makes them differ."""
    groups = np.repeat(np.arange(30), 10)
    return random.normal(size=30)[groups] + 0.3 * random.normal(size=300), groups


def test_the_interval_of_values_that_hang_together_holds() -> None:
    def sample(random: np.random.Generator, label: str) -> Estimate:
        values, groups = grouped(random)
        return mean(values, groups, Draws(30, label))

    assert coverage(0.0, sample, NUM) >= FLOOR


def test_ignoring_that_they_do_is_noticed() -> None:
    """Control: each value drawn by itself."""

    def sample(random: np.random.Generator, label: str) -> Estimate:
        values, _ = grouped(random)
        return mean(values, np.arange(300), Draws(300, label))

    assert coverage(0.0, sample, 100) < 0.7


def test_a_difference_of_percentiles() -> None:
    random = np.random.default_rng(3)
    one, other = (
        distribution(random.normal(at, 1, 500), np.arange(500), Draws(500, f"{at}"))
        for at in (5, 3)
    )
    found = difference(one, other, 50)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 2 < found.high
    assert found.value == pytest.approx(2, abs=0.3)
    few = distribution(np.arange(5), np.arange(5), Draws(5, "few"))
    assert difference(one, few, 99) == Estimate()


def test_rates() -> None:
    found = rate(Stretches(np.array([10.0, 20.0, 30.0]), np.array([5.0, 5.0, 5.0])), "a")
    assert found == Estimate(4.0)  # three stretches have no interval
    assert (
        rate_ratio(
            Stretches(np.ones(6), np.ones(6)), Stretches(np.zeros(6), np.ones(6)), ("a", "b")
        )
        == Estimate()
    )
