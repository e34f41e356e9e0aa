"""The survival window tells what budgets and prices would have given, and notices false claims."""

from __future__ import annotations

import numpy as np
import pytest
from budget_worlds import chain_rows, record
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.budget.survival import PRICES, SurvivalWindow, gains

BUDGETS = (0, 1, 3, 7, 15)
rows = st.lists(
    st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=9).map(
        lambda row: sorted(row, reverse=True)
    ),
    min_size=1,
    max_size=5,
)


def _matrix(lists: list[list[float]]) -> np.ndarray:
    width = max(map(len, lists))
    return np.array([row + [0.0] * (width - len(row)) for row in lists], dtype=np.float32)


@given(rows)
@settings(max_examples=50, deadline=None)
def test_gains_are_sums_over_drafts_within_the_budget_and_worth_the_price(lists):
    survivals = _matrix(lists).astype(float)
    correct, drafts = gains(survivals, np.array(BUDGETS), np.array(PRICES))
    for c, budget in enumerate(BUDGETS):
        for p, price in enumerate(PRICES):
            kept = [s for row in survivals for s in row[:budget] if s >= price and s > 0]
            assert drafts[c, p] == len(kept)
            assert correct[c, p] == pytest.approx(sum(kept))


def test_a_calibrated_window_expects_what_chains_emit():
    rng, window = np.random.default_rng(1), SurvivalWindow(BUDGETS)
    emitted = []
    for _ in range(400):
        alphas = rng.uniform(0.3, 0.9, 8)
        made = record(15, chain_rows(alphas, 15), rng.geometric(1 - alphas) - 1)
        emitted += [1 + n for n in made.num_correct]
        window.observe(made)
    tokens, drafts = window.expected()
    assert tokens[4, 0] == pytest.approx(np.mean(emitted[-2000:]), rel=0.05)
    assert tokens[0].tolist() == [1.0] * len(PRICES)
    assert not drafts[0].any()
    assert (np.diff(tokens, axis=0) >= 0).all()
    assert (np.diff(tokens, axis=1) <= 1e-12).all()


@pytest.mark.parametrize(("truth", "claimed"), [(0.3, 0.8), (0.0, 0.9), (0.8, 0.4)])
def test_a_false_claim_is_corrected(truth, claimed):
    rng, window = np.random.default_rng(2), SurvivalWindow(BUDGETS)
    for _ in range(300):
        correct = rng.geometric(1 - truth, 8) - 1
        window.observe(record(7, chain_rows([claimed] * 8, 7), correct))
    true = 1 + sum(truth**d for d in range(1, 8))
    said = 1 + sum(claimed**d for d in range(1, 8))
    tokens = window.expected()[0][3, 0]
    assert tokens == pytest.approx(true, rel=0.12)
    assert abs(tokens - said) > abs(true - said) / 2  # control: the claim itself is refused


def test_a_corrected_curve_falls_and_stays_a_probability():
    """Drafts that are all correct, though the first was said to be unlikely."""
    window = SurvivalWindow(BUDGETS)
    for _ in range(100):
        window.observe(record(7, np.full((4, 7), 0.2, np.float32), [7] * 4))
    assert window.curve.max() <= 1
    assert (np.diff(window.curve) <= 1e-12).all()
    assert window.expected()[0][3, 0] == pytest.approx(8, rel=0.05)


def test_drafts_below_the_price_have_no_outcome():
    """Every draft that was verified was correct: nothing is to be corrected downwards."""
    window = SurvivalWindow(BUDGETS)
    survivals = np.array([[0.95, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1]] * 4, np.float32)
    for _ in range(100):
        window.observe(record(7, survivals, [2] * 4, price=0.3))
    assert min(window.state["corrections"].values()) >= 0.99
    without = SurvivalWindow(BUDGETS)
    for _ in range(100):  # control: verified, they would have failed
        without.observe(record(7, survivals, [2] * 4))
    assert min(without.state["corrections"].values()) < 0.5


class TestTail:
    def test_small_budgets_tell_about_larger_ones_by_a_geometric_tail(self):
        window = SurvivalWindow(BUDGETS)
        rng = np.random.default_rng(3)
        for _ in range(100):
            window.observe(record(3, chain_rows([0.7] * 4, 3), rng.geometric(0.3, 4) - 1))
        true = sum(0.7**d for d in range(1, 16))
        assert window.expected()[0][4, 0] == pytest.approx(1 + true, rel=0.15)

    def test_it_is_never_zero_and_never_above_the_last_survival_seen(self):
        window = SurvivalWindow(BUDGETS)
        window.observe(record(3, np.array([[0.5, 0.5, 0.5]], np.float32), [1]))
        tokens, drafts = window.expected()
        assert tokens[2, 0] < tokens[4, 0] <= tokens[2, 0] + 12 * 0.5 + 1e-9
        assert drafts[4, 0] == 15

    def test_the_shape_of_larger_rounds_is_remembered(self):
        """Drafts that end after the fourth: no tail is made up in later small rounds."""
        survivals = np.zeros((4, 15), np.float32)
        survivals[:, :4] = [0.9, 0.8, 0.7, 0.6]
        window = SurvivalWindow(BUDGETS)
        for _ in range(50):
            window.observe(record(15, survivals, [3] * 4))
        for _ in range(200):
            window.observe(record(3, survivals[:, :3], [3] * 4))
        tokens, _ = window.expected()
        assert tokens[4, 0] <= tokens[2, 0] + 1
        naive = SurvivalWindow(BUDGETS)  # control: without that memory the tail is long
        for _ in range(200):
            naive.observe(record(3, survivals[:, :3], [3] * 4))
        assert naive.expected()[0][4, 0] > tokens[4, 0] + 2

    def test_a_row_that_ends_early_is_taken_at_its_word(self):
        window = SurvivalWindow(BUDGETS)
        window.observe(record(15, np.array([[0.5, 0.4]], np.float32), [1]))
        tokens, drafts = window.expected()
        assert tokens[4, 0] == tokens[2, 0]
        assert drafts[4, 0] == 2


def test_a_drafter_that_finds_nothing_counts_as_one_token():
    window = SurvivalWindow(BUDGETS)
    for _ in range(200):
        survivals = np.zeros((4, 3), np.float32)
        survivals[0] = 1.0
        window.observe(record(3, survivals, [3, 0, 0, 0]))
    assert window.expected()[0][2, 0] == pytest.approx(1 + 3 / 4, rel=0.01)


def test_requests_that_opted_out_do_not_count():
    window = SurvivalWindow(BUDGETS)
    survivals = np.zeros((4, 3), np.float32)
    survivals[0] = 1.0
    window.observe(record(3, survivals, [3, 0, 0, 0], num_opted_out=3))
    assert window.num_observed == 1


def test_weights_halve_over_request_rounds_whatever_the_batch():
    def after(batch: int) -> float:
        window = SurvivalWindow(BUDGETS, half_life=64)
        for _ in range(640 // batch):
            window.observe(record(3, chain_rows([0.9] * batch, 3), [3] * batch))
        for _ in range(64 // batch):
            window.observe(record(3, chain_rows([0.1] * batch, 3), [0] * batch))
        return float(window.expected()[1][2, 3] / 3)  # share that is worth 0.1

    assert after(1) == pytest.approx(after(16), abs=0.12)


def test_plain_decoding_ages_the_window_but_never_empties_it():
    window = SurvivalWindow(BUDGETS)
    for _ in range(100):
        window.observe(record(3, chain_rows([0.9] * 4, 3), [3] * 4))
    before, known = window.num_observed, window.expected()[0].copy()
    for _ in range(10_000):
        window.observe(record(0, np.zeros((4, 0), np.float32), [0] * 4))
    assert 64 <= window.num_observed < before / 2
    np.testing.assert_allclose(window.expected()[0], known, rtol=0.2)


def test_plain_decoding_at_the_floor_leaves_what_was_worked_out():
    window = SurvivalWindow(BUDGETS)
    drafted = record(3, chain_rows([0.9] * 4, 3), [3] * 4)
    plain = record(0, np.zeros((4, 0), np.float32), [0] * 4)
    for _ in range(100):
        window.observe(drafted)
    young, _ = window.expected()
    window.observe(plain)
    assert window.expected()[0] is not young, "it ages above the floor"
    for _ in range(1000):
        window.observe(plain)
    old, curve = window.expected()[0], window.curve
    window.observe(plain)
    assert window.expected()[0] is old
    assert window.curve is curve
    window.observe(drafted)
    assert window.expected()[0] is not old
    assert window.curve is not curve


def test_a_request_factor_finds_the_request_that_fails():
    rng, window = np.random.default_rng(4), SurvivalWindow(BUDGETS)
    for _ in range(200):
        correct = [*(rng.geometric(0.2, 7) - 1), 0]
        window.observe(record(7, chain_rows([0.8] * 8, 7), correct))
    good = window.requests.factors([f"r{row}" for row in range(7)]).tolist()
    assert window.requests.factors(["r7"])[0] < 0.2
    assert min(good) > 0.7
    assert window.requests.factors(["never seen"])[0] == 1


def test_requests_are_forgotten():
    window = SurvivalWindow(BUDGETS)
    for number in range(3000):
        made = record(1, chain_rows([0.5], 1), [0], request_ids=[f"q{number}"])
        window.observe(made)
    assert len(window.requests) <= 2048


@pytest.mark.parametrize(
    ("budgets", "prices", "message"),
    [
        ((1, 3), PRICES, "budgets must rise from 0"),
        ((0, 3, 3), PRICES, "budgets must rise from 0"),
        (BUDGETS, (0.1,), "prices must rise from 0"),
    ],
)
def test_bad_axes_are_refused(budgets, prices, message):
    with pytest.raises(ValueError, match=message):
        SurvivalWindow(budgets, prices)
