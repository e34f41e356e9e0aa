"""Slo, ema and oracle policies keep what their names promise."""

from __future__ import annotations

import numpy as np
import pytest
from budget_worlds import CHOICES, World, chain_rows, cost_table, record
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.budget.base import BudgetRuntime, Load
from specstack.budget.costs import CostModel
from specstack.budget.ema import EmaPolicy
from specstack.budget.goodput import GoodputPolicy
from specstack.budget.oracle import OraclePolicy
from specstack.budget.slo import SloPolicy
from specstack.budget.survival import PRICES, SurvivalWindow


def _round_ms(world: World, requests: int, budget: int) -> float:
    spent = world.costs.step_ms(requests, 100.0, np.array([budget]), np.array([[1.0 + budget]]))
    return float(spent[0, 0])


class TestSlo:
    TABLE = cost_table(base=20.0, per_token=0.2)
    WANTS = (True,) * 15 + (False,)

    def test_a_time_per_token_bounds_rounds_beside_a_request_that_opted_out(self):
        """It waits a whole round for each token."""
        free = World(GoodputPolicy(CHOICES), self.TABLE, ragged=False)
        free.run(200, [0.9] * 16, speculating=self.WANTS)
        wanted = _round_ms(free, 16, free.budgets[-1].draft_budget)
        bound = World(SloPolicy(CHOICES, tpot_ms=wanted - 1), self.TABLE, ragged=False)
        bound.run(200, [0.9] * 16, speculating=self.WANTS)
        chosen = bound.budgets[-1]
        assert chosen.reason == "slo"
        assert 0 < chosen.draft_budget < free.budgets[-1].draft_budget
        assert _round_ms(bound, 16, chosen.draft_budget) <= wanted - 1

    def test_a_target_that_is_met_changes_nothing(self):
        made = []
        for policy in (GoodputPolicy(CHOICES), SloPolicy(CHOICES, tpot_ms=1000.0)):
            made.append(World(policy, self.TABLE).run(200, [0.8] * 8))
        assert made[0] == made[1]

    def test_without_a_choice_that_meets_it_the_nearest_one_is_taken(self):
        world = World(SloPolicy(CHOICES, tpot_ms=1.0), self.TABLE, ragged=False)
        world.run(200, [0.0] * 16, speculating=self.WANTS)
        assert world.budgets[-1].draft_budget == 0  # the shortest round

    def test_rounds_are_short_while_requests_queue(self):
        world = World(SloPolicy(CHOICES, ttft_ms=30.0), self.TABLE, ragged=False)
        world.run(200, [0.9] * 16)
        busy = world.budgets[-1].draft_budget
        queued = world.round([0.9] * 16, num_queued=3)
        assert _round_ms(world, 16, busy) > 30
        assert _round_ms(world, 16, queued.draft_budget) <= 30
        assert queued.reason == "slo"
        assert world.round([0.9] * 16).draft_budget == busy

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "give tpot_ms, ttft_ms or both"),
            ({"tpot_ms": 0.0}, "tpot_ms must be above 0, got 0.0"),
            ({"ttft_ms": -1.0}, "ttft_ms must be above 0, got -1.0"),
        ],
    )
    def test_bad_targets_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            SloPolicy(CHOICES, **options)


class TestEma:
    @pytest.mark.parametrize(("alpha", "budget"), [(0.95, 15), (0.8, 7), (0.5, 3), (0.05, 1)])
    def test_it_goes_where_drafts_are_correct(self, alpha, budget):
        world = World(EmaPolicy([1, 3, 7, 15]), seed=3)
        world.run(600, [alpha] * 8)
        found = [made.draft_budget for made in world.budgets[-300:]]
        assert np.median(found) == budget

    def test_size_classes_learn_apart(self):
        policy = EmaPolicy([1, 3, 7], max_batches=[1, 8])
        world = World(policy)
        world.run(200, [0.95])
        world.run(200, [0.02] * 4)
        assert policy.next(world.load(1)).draft_budget == 7
        assert policy.next(world.load(8)).draft_budget == 1

    def test_beyond_the_last_size_class_it_decodes_plainly(self):
        policy = EmaPolicy([1, 3], max_batches=[1, 8])
        assert policy.next(Load(9)).draft_budget == 0
        assert policy.next(Load(9)).reason == "batch>8"
        assert policy.next(Load(8)).draft_budget > 0

    def test_it_waits_ten_rounds_then_five(self):
        policy = EmaPolicy([1, 3, 7, 15])
        found = []
        for _ in range(26):
            found.append(policy.next(Load(1)).draft_budget)
            policy.observe(record(15, chain_rows([0.9], 15), [15]))
        assert found == [3] * 10 + [7] * 10 + [15] * 6

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"choices": [0, 1]}, "choices must rise from at least 1, got"),
            ({"choices": [1], "max_batches": []}, "max_batches must rise from at least 1, got"),
            ({"choices": [1], "room": 0.0}, "room must be in"),
            ({"choices": [1], "hysteresis": -1.0}, "hysteresis must be at least 0"),
        ],
    )
    def test_bad_options_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            EmaPolicy(**options)


class TestOracle:
    @staticmethod
    def _goodput(costs: CostModel, survivals: np.ndarray, budget: int, price: float) -> float:
        kept = [row[:budget][(row[:budget] >= price) & (row[:budget] > 0)] for row in survivals]
        width = 1 + sum(map(len, kept)) / len(kept)
        spent = costs.step_ms(len(kept), 0.0, np.array([budget]), np.array([[width]]))
        return (len(kept) + sum(row.sum() for row in kept)) / spent[0, 0]

    @given(
        alphas=st.lists(st.floats(0.0, 0.97), min_size=1, max_size=6),
        per_token=st.floats(0.01, 3.0),
        fixed=st.sampled_from([(w, p) for w in CHOICES for p in PRICES]),
    )
    @settings(max_examples=60, deadline=None)
    def test_no_fixed_budget_and_price_is_better(self, alphas, per_token, fixed):
        costs = CostModel(cost_table(per_token=per_token))
        policy = OraclePolicy(CHOICES)
        policy.attach(BudgetRuntime(costs, SurvivalWindow(CHOICES), ragged=True))
        survivals = chain_rows(alphas, 15).astype(float)
        policy.foresee(survivals)
        chosen = policy.next(Load(len(alphas)))
        best = self._goodput(costs, survivals, chosen.draft_budget, chosen.min_survival)
        assert best >= self._goodput(costs, survivals, *fixed) * (1 - 1e-9)

    def test_control_a_wrong_vision_is_beaten(self):
        costs = CostModel(cost_table())
        policy = OraclePolicy(CHOICES)
        policy.attach(BudgetRuntime(costs, SurvivalWindow(CHOICES), ragged=True))
        policy.foresee(chain_rows([0.95] * 4, 15))
        chosen = policy.next(Load(4))
        truth = chain_rows([0.05] * 4, 15).astype(float)
        found = self._goodput(costs, truth, chosen.draft_budget, chosen.min_survival)
        assert found < self._goodput(costs, truth, 0, 0.0)

    def test_it_decides_only_what_it_foresaw(self):
        policy = OraclePolicy(CHOICES)
        policy.attach(BudgetRuntime(CostModel(cost_table()), SurvivalWindow(CHOICES), True))
        with pytest.raises(RuntimeError, match=r"call foresee\(\) first"):
            policy.next(Load(1))

    def test_choices_begin_with_plain_decoding(self):
        with pytest.raises(ValueError, match=r"choices must rise from 0, got \[1\]"):
            OraclePolicy([1])
