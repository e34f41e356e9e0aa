"""Measures of synthetic rounds, whose truth is known, and the bound against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specstack.evaluation.bound import greedy_bound, path_bound
from specstack.evaluation.measures import (
    Estimate,
    Estimator,
    accept_length_of,
    measure,
    reliability,
)
from specstack.evaluation.tallies import Q_EDGES, Counts, Reliability, Rounds, count

ALPHAS = np.array([0.8, 0.6, 0.7])


def unmerged(num_rounds: int) -> np.ndarray:
    """Drafts per drafter where there is one."""
    return np.zeros((num_rounds, 0), dtype=np.int64)


def bernoulli_rounds(num_sequences: int, seed: int, per_sequence: int = 20) -> Rounds:
    """Rounds of a chain whose drafts of depth k are right with probability ALPHAS[k]."""
    random = np.random.default_rng(seed)
    sequence = np.repeat(np.arange(num_sequences), per_sequence)
    is_right = random.random((len(sequence), len(ALPHAS))) < ALPHAS
    num_right = is_right.cumprod(axis=1).sum(axis=1)
    zeros, none = np.zeros_like(sequence), unmerged(len(sequence))
    return Rounds(sequence, zeros, num_right, zeros, zeros + len(ALPHAS), num_right + 1, none, none)


def test_measures_of_a_table_by_hand() -> None:
    #  sequence, context, right, cut, drafts, emitted
    table = np.array([[0, 9, 2, 0, 3, 3], [0, 12, 0, 0, 1, 1], [1, 4, 1, 1, 2, 1]])
    counts = count(Rounds(*table.T, unmerged(3), unmerged(3)), 3, 2)
    assert counts.total.reached.tolist() == [3, 1], "the cut round has no second depth"
    assert counts.total.right.tolist() == [2, 1]
    found = measure(counts, num_draws=100, seed=0)
    assert found.num_sequences == 2, "a sequence without rounds is none"
    assert found.accept_length.value == pytest.approx(1 + 2 / 3 + 2 / 3)
    assert found.as_served.value == pytest.approx(5 / 3)
    assert found.accept_rate.value == pytest.approx(3 / 6)
    assert found.survival == pytest.approx((2 / 3, 2 / 3))
    assert found.retention.value == pytest.approx(1.5)
    assert found.drafts_per_round == 2
    assert found.drafters == {}


#   sequence, context, right, cut, drafts, emitted
MERGED = np.array([[0, 9, 2, 0, 5, 3], [0, 12, 1, 0, 3, 2], [1, 4, 1, 0, 4, 2], [2, 8, 0, 0, 2, 1]])
DRAFTS = np.array([[4, 2, 0], [1, 2, 0], [4, 1, 0], [0, 2, 0]])
"""Of three drafters: the first two share a draft in rounds 0 and 2, the last one has none."""
RIGHT = np.array([[2, 1, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]])


def merged_rounds(drafts: np.ndarray, right: np.ndarray) -> Rounds:
    return Rounds(*MERGED.T, drafts, right)


def test_drafters_of_a_merge_by_hand() -> None:
    counts = count(merged_rounds(DRAFTS, RIGHT), 3, 2)
    found = measure(counts, num_draws=200, seed=0, drafters=("block", "ngram", "idle"))
    assert list(found.drafters) == ["block", "ngram", "idle"]
    numbers = {
        name: (d.num_drafts, d.num_right, d.accept_rate.value, d.share.value)
        for name, d in found.drafters.items()
    }
    assert numbers == {
        "block": (9, 3, pytest.approx(3 / 9), pytest.approx(3 / 4)),
        "ngram": (7, 3, pytest.approx(3 / 7), pytest.approx(3 / 4)),
        "idle": (0, 0, None, 0),
    }
    rate = found.drafters["block"].accept_rate
    assert (rate.low, rate.high) == (pytest.approx(1 / 4), pytest.approx(2 / 5)), "of a sequence"
    assert found.drafters["block"].as_data() == {
        "drafts": 9, "right": 3, "accept_rate": rate.as_data(),
        "share_of_right": found.drafters["block"].share.as_data(),
    }  # fmt: skip


def test_drafters_are_counted_in_the_rounds_that_are_kept() -> None:
    rounds = merged_rounds(DRAFTS, RIGHT)
    parts = [rounds.where(rounds.sequence == i) for i in range(3)]
    names = ("block", "ngram")
    found = [measure(count(p, 3, 2), num_draws=100, seed=0, drafters=names) for p in parts]
    assert [m.drafters["block"].num_drafts for m in found] == [5, 4, 0]
    assert [m.drafters["ngram"].share.value for m in found] == [pytest.approx(2 / 3), 1, None]
    joined = count(Rounds.join(parts), 3, 2)
    assert joined.total.drafts_per_drafter.tolist() == [9, 7, 0]


def test_drafts_of_the_other_drafter_are_noticed() -> None:
    """Control: two drafters that are taken for each other."""
    names = ("block", "ngram", "idle")
    found = [
        measure(count(rounds, 3, 2), num_draws=100, seed=0, drafters=names).drafters
        for rounds in (merged_rounds(DRAFTS, RIGHT),
                       merged_rounds(DRAFTS[:, [1, 0, 2]], RIGHT[:, [1, 0, 2]]))
    ]  # fmt: skip
    assert found[0]["block"] == found[1]["ngram"] != found[1]["block"]


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    truth = 1 + np.cumprod(ALPHAS).sum()
    num_covered = 0
    for seed in range(200):
        counts = count(bernoulli_rounds(40, seed), 40, len(ALPHAS))
        found = Estimator(counts, num_draws=300, seed=seed)(accept_length_of)
        assert found.low is not None
        assert found.high is not None
        num_covered += found.low <= truth <= found.high
    assert 0.89 <= num_covered / 200 <= 0.99


def test_intervals_are_wider_where_rounds_of_a_sequence_resemble_each_other() -> None:
    """All rounds of a sequence alike: twenty of them are worth one."""
    rounds = bernoulli_rounds(40, 0)
    alike = np.repeat(rounds.num_right[::20], 20)
    clustered = Rounds(rounds.sequence, rounds.context_len, alike, rounds.is_cut,
                       rounds.num_drafts, alike + 1, rounds.drafts_per_drafter,
                       rounds.right_per_drafter)  # fmt: skip
    width = {}
    for name, table in (("independent", rounds), ("alike", clustered)):
        found = Estimator(count(table, 40, 3), num_draws=500, seed=1)(accept_length_of)
        assert found.low is not None
        assert found.high is not None
        width[name] = found.high - found.low
    assert 3 < width["alike"] / width["independent"] < 6, "about the root of 20"


def test_one_seed_gives_the_same_intervals() -> None:
    counts = count(bernoulli_rounds(10, 3), 10, 3)
    assert measure(counts, num_draws=100, seed=4) == measure(counts, num_draws=100, seed=4)


def test_a_single_sequence_has_no_interval_and_no_rounds_have_no_measure() -> None:
    found = measure(count(bernoulli_rounds(1, 0), 1, 3), num_draws=100, seed=0)
    assert found.accept_length.value is not None
    assert found.accept_length.low is None
    none = Counts(*(np.zeros((2, 3)) for _ in range(2)), *(np.zeros(2) for _ in range(4)),
                  *(np.zeros((2, 1)) for _ in range(2)))  # fmt: skip
    empty = measure(none, num_draws=100, seed=0, drafters=("ngram",))
    assert empty.drafters["ngram"].accept_rate == empty.drafters["ngram"].share == Estimate(None)
    assert (empty.num_rounds, empty.accept_length.value, empty.accept_rate.value) == (0, None, None)


def test_reliability_bins() -> None:
    found = Reliability.empty(2)
    q = np.array([0.0, 0.005, 0.5, 0.55, 0.95, 1.0])
    found.add(np.array([0, 0, 1, 1, 0, 1]), q, np.array([0, 0, 1, 0, 1, 1], dtype=bool))
    bins, error = reliability(found, num_draws=100, seed=0)
    assert [(b.low, b.num_drafts, b.right.value) for b in bins] == [
        (0.0, 2, 0.0), (0.5, 2, 0.5), (0.95, 2, 1.0),
    ]  # fmt: skip
    assert [b.mean_q for b in bins] == pytest.approx([0.0025, 0.525, 0.975])
    assert error == pytest.approx((0.005 + 0.05 + 0.05) / 6)
    assert Q_EDGES[0] == 0
    assert Q_EDGES[-1] == 1
    assert reliability(Reliability.empty(2), num_draws=100, seed=0) == ([], None)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_bound_is_the_sum_of_the_likeliest_paths(depth: int) -> None:
    random = np.random.default_rng(depth)
    laws: dict[tuple[int, ...], np.ndarray] = {}

    def law(path: tuple[int, ...]) -> list[tuple[int, float]]:
        p = laws.setdefault(path, random.dirichlet([0.4] * 3))
        return [(int(i), float(p[i])) for i in np.argsort(-p)]

    paths = [p for d in range(1, depth + 1) for p in itertools.product(range(3), repeat=d)]
    chances = []
    for path in paths:
        steps = (dict(law(path[:d]))[path[d]] for d in range(len(path)))
        chances.append(np.prod(list(steps)))
    best = np.sort(chances)[::-1]
    budgets = [1, 3, len(paths), len(paths) + 5]
    expected = [1 + best[:b].sum() for b in budgets]
    assert path_bound(law, budgets, depth) == pytest.approx(expected)


def test_the_bound_of_a_certain_law_is_the_greedy_one() -> None:
    for budget, depth in [(1, 4), (4, 4), (9, 4)]:
        certain = path_bound(lambda path: [(0, 1.0)], [budget], depth)
        assert certain == [greedy_bound(budget, depth)]
