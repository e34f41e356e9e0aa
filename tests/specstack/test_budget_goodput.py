"""Goodput takes what gives the most tokens per second, and neither flaps nor sticks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from budget_worlds import CHOICES, World, chain_rows, cost_table, record, switches
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.budget.base import BudgetRuntime, Load
from specstack.budget.costs import CostModel
from specstack.budget.goodput import GoodputPolicy
from specstack.budget.survival import SurvivalWindow

HYSTERESIS = 0.03


def _goodputs(world: World, requests: int) -> np.ndarray:
    """Tokens per millisecond of every budget and price, written out."""
    emitted, drafts = world.window.expected()
    made = np.zeros((len(CHOICES), len(world.window.prices)))
    for c, budget in enumerate(CHOICES):
        for p in range(made.shape[1]):
            width = 1 + (drafts[c, p] if world.ragged else budget)
            spent = world.costs.step_ms(
                requests, 100.0, np.array([budget]), np.array([[float(width)]])
            )
            made[c, p] = requests * emitted[c, p] / spent[0, 0]
    return made if world.ragged else made[:, :1]


@given(
    alpha=st.floats(0.0, 0.95),
    requests=st.sampled_from([1, 3, 16, 40]),
    per_token=st.floats(0.02, 3.0),
    draft=st.floats(0.1, 15.0),
    ragged=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_its_steady_choice_is_the_best_one_within_the_hysteresis(
    alpha, requests, per_token, draft, ragged
):
    table = cost_table(per_token=per_token, draft=draft)
    world = World(GoodputPolicy(CHOICES), table, ragged=ragged)
    world.run(100, [alpha] * requests)
    world.policy.next(world.load(requests))
    choice, price = world.policy.state["choice"], world.policy.state["price"]
    found = _goodputs(world, requests)
    row = CHOICES.index(choice)
    column = world.window.prices.tolist().index(price)
    # The window moved on since the last comparison, by at most 8 rounds.
    assert found[row, column] * (1 + HYSTERESIS) >= found.max() * 0.97
    assert ragged or price == 0


def test_without_acceptance_it_turns_drafting_off():
    world = World(GoodputPolicy(CHOICES), claimed=lambda alpha: 0.8)
    last = world.run(400, [0.0] * 4)[-50:]
    assert {budget.draft_budget for budget in last if budget.reason != "probe"} == {0}
    assert last[-1].reason == "off"


def test_at_a_load_without_idle_compute_it_turns_drafting_off():
    world = World(GoodputPolicy(CHOICES), cost_table(per_token=3.0), ragged=False)
    assert world.run(50, [0.3] * 32)[-1].reason == "off"
    other = World(GoodputPolicy(CHOICES), cost_table(per_token=0.01), ragged=False)
    assert other.run(50, [0.3] * 32)[-1].draft_budget > 0  # control: acceptance is not at fault


def test_a_burst_is_answered_in_its_first_round():
    world = World(GoodputPolicy(CHOICES, dwell_rounds=1000), cost_table(per_token=1.0))
    alone = world.run(300, [0.8])[-1]
    burst = world.run(1, [0.8] * 16)[0]
    again = world.run(1, [0.8])[0]
    assert alone.draft_budget > burst.draft_budget
    assert again.draft_budget == alone.draft_budget


class TestNoise:
    """Acceptance that alternates between good and bad rounds, near where two budgets are equal."""

    @staticmethod
    def _run(policy: GoodputPolicy, rounds: int = 400) -> int:
        table = cost_table(base=10)
        world = World(policy, table, ragged=False, half_life=16.0)
        return switches(
            [world.round([0.8 if turn // 8 % 2 else 0.7] * 4) for turn in range(rounds)]
        )

    def test_it_does_not_flap(self):
        assert self._run(GoodputPolicy(CHOICES)) <= 8
        assert self._run(GoodputPolicy(CHOICES, hysteresis=0.1, dwell_rounds=32)) <= 2

    def test_control_without_dwell_and_hysteresis_it_flaps(self):
        assert self._run(GoodputPolicy(CHOICES, hysteresis=0.0, dwell_rounds=0)) > 16


class TestProbes:
    def test_they_find_out_that_drafting_pays_again(self):
        world = World(GoodputPolicy(CHOICES), claimed=lambda alpha: 0.8)
        world.run(600, [0.0] * 4)
        assert world.budgets[-1].draft_budget == 0
        world.run(3000, [0.85] * 4)
        assert world.budgets[-1].draft_budget >= 3
        assert world.budgets[-1].reason in ("goodput", "hold")

    @pytest.mark.parametrize("requests", [1, 16])
    def test_they_cost_less_than_two_percent(self, requests):
        world = World(GoodputPolicy(CHOICES), claimed=lambda alpha: 0.8)
        world.run(600, [0.0] * requests)
        world.milliseconds, world.tokens = 0.0, 0
        world.run(3000, [0.0] * requests)
        plain = float(world.costs.step_ms(requests, 100.0, np.array([0]), np.ones((1, 1)))[0, 0])
        assert world.milliseconds / world.tokens * requests < 1.02 * plain
        assert any(budget.reason == "probe" for budget in world.budgets[-3000:])

    def test_they_grow_rare(self):
        world = World(GoodputPolicy(CHOICES), claimed=lambda alpha: 0.8)
        world.run(6000, [0.0] * 4)
        turns = [i for i, budget in enumerate(world.budgets) if budget.reason == "probe"]
        assert max(np.diff(turns)) == 1024


class TestLearning:
    def test_without_a_cost_table_it_decodes_plainly_but_for_probes(self):
        world = World(GoodputPolicy(CHOICES), table=None)
        made = world.run(2000, [0.9])
        assert {b.reason for b in made} == {"learning", "probe"}
        assert {b.draft_budget for b in made if b.reason == "learning"} == {0}
        assert sum(b.draft_budget > 0 for b in made) < 40

    def test_with_a_table_it_tries_a_middle_budget_first(self):
        world = World(GoodputPolicy(CHOICES))
        first, *_, last = world.run(12, [0.9])
        assert (first.draft_budget, first.reason) == (7, "learning")
        assert last.reason in ("goodput", "hold")

    def test_where_nobody_may_draft_it_is_idle(self):
        world = World(GoodputPolicy(CHOICES))
        assert world.round([0.9, 0.9], speculating=(False, False)).reason == "idle"


class TestRequests:
    def test_a_long_request_does_not_draft(self):
        world = World(GoodputPolicy(CHOICES, max_context=1000), ragged=False)
        world.run(100, [0.8] * 2)
        ids = ("r0", "r1")
        mixed = world.policy.next(Load(2, context_lens=(500, 2000), request_ids=ids))
        assert mixed.draft_budget > 0
        assert mixed.request_budgets == (mixed.draft_budget, 0)
        alone = world.policy.next(Load(1, context_lens=(2000,), request_ids=("r1",)))
        assert (alone.draft_budget, alone.reason) == (0, "idle")
        short = world.policy.next(Load(2, context_lens=(500, 500), request_ids=ids))
        assert short.request_budgets is None

    def test_a_failing_request_is_left_out_and_tried_again(self):
        table = cost_table(base=5.0, per_token=0.8)
        world = World(GoodputPolicy(CHOICES), table, claimed=lambda alpha: 0.8)
        made = world.run(700, [0.8] * 7 + [0.0])[300:]
        limits = [budget.request_budgets for budget in made if budget.draft_budget]
        left_out = [one is not None and one[7] == 0 for one in limits]
        assert 0.8 < np.mean(left_out) < 1
        assert all(one is None or min(one[:7]) > 0 for one in limits)

    def test_where_all_are_padded_no_failing_request_is_left_out(self):
        """Its nodes are computed all the same."""
        world = World(GoodputPolicy(CHOICES), ragged=False, claimed=lambda alpha: 0.8)
        made = world.run(300, [0.8] * 7 + [0.0])
        assert all(budget.request_budgets is None for budget in made)

    def test_requests_that_opted_out_count_as_one_token(self):
        """Drafting for few of many must pay for the whole batch."""
        few = (True, *(False,) * 15)
        made = []
        for wants in ((), few):
            table = cost_table(per_token=0.1, draft=6.0)
            world = World(GoodputPolicy(CHOICES), table, ragged=True)
            world.run(200, [0.6] * 16, speculating=wants)
            made.append(world.budgets[-1].draft_budget)
        assert made[0] > 0 == made[1]


class TestDeterminism:
    """Ranks of tensor parallelism decide apart and must decide the same."""

    @staticmethod
    def _decisions(policy: GoodputPolicy) -> list[object]:
        world = World(policy, seed=5, half_life=32.0)
        for turn in range(300):
            world.round([0.8 if turn % 40 < 20 else 0.2] * (1 + turn // 50 * 3))
        return [
            (b.draft_budget, b.reason, b.min_survival, b.request_budgets) for b in world.budgets
        ]

    def test_equal_calls_decide_the_same(self):
        assert self._decisions(GoodputPolicy(CHOICES)) == self._decisions(GoodputPolicy(CHOICES))

    def test_control_a_policy_that_reads_the_clock_does_not(self):
        class ByTheClock(GoodputPolicy):
            def next(self, load):
                self._since = time.perf_counter_ns() % 16
                return super().next(load)

        first = self._decisions(ByTheClock(CHOICES, hysteresis=0.0))
        assert any(self._decisions(ByTheClock(CHOICES, hysteresis=0.0)) != first for _ in range(5))


def test_a_decision_is_quick():
    """A bound that only a mistake breaks; the aim is 50 microseconds."""
    world = World(GoodputPolicy(CHOICES))
    world.run(50, [0.8] * 16)
    started = time.perf_counter()
    for _ in range(100):
        world.policy.next(world.load(16))
    assert (time.perf_counter() - started) / 100 < 5e-3


def test_a_window_without_its_choices_is_refused():
    window = SurvivalWindow((0, 1, 3))
    with pytest.raises(ValueError, match=r"the survival window lacks the budgets \[7, 15\]"):
        GoodputPolicy(CHOICES).attach(BudgetRuntime(CostModel(cost_table()), window, True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choices": [1, 3]}, r"choices must rise from 0 to a draft at least, got \[1, 3\]"),
        ({"choices": [0]}, "choices must rise from 0"),
        ({"choices": [0, 3, 3]}, "choices must rise from 0"),
        ({"choices": [0, 1], "dwell_rounds": -1}, "dwell_rounds must be at least 0, got -1"),
        ({"choices": [0, 1], "hysteresis": 1.0}, "hysteresis must be in"),
        ({"choices": [0, 1], "max_context": 0}, "max_context must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GoodputPolicy(**options)


def test_drawn_drafts_get_no_price():
    table = cost_table(base=10.0, per_token=0.8)
    for prices, wanted in ((False, {0.0}), (True, None)):
        world = World(GoodputPolicy(CHOICES, prices=prices), table)
        found = {b.min_survival for b in world.run(200, [0.7, 0.2] * 4)}
        assert found == wanted if wanted else max(found) > 0


def test_records_of_chains_say_what_was_accepted():
    """Control of the made-up engine."""
    made = record(3, chain_rows([0.9, 0.1], 3), [2, 3], price=0.05)
    assert made.num_correct == (2, 1)
    assert made.accept_ranks.tolist() == [[1, 2, 0], [1, 0, 0]]
