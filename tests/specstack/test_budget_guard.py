"""The collapse guard turns drafting off when nothing is accepted, and on again when it is."""

from __future__ import annotations

import pytest
from budget_worlds import World, cost_table, switches

from specstack.budget.base import Budget, Load, LoadPolicy
from specstack.budget.costs import CostTable
from specstack.budget.fixed import FixedPolicy
from specstack.budget.gates import Probes
from specstack.budget.guard import CollapseGuard

TABLE = cost_table()


def _world(guard: CollapseGuard, table: CostTable | None = TABLE) -> World:
    """A drafter that is always sure of itself."""
    return World(guard, table, claimed=lambda alpha: 0.8)


def test_collapsed_acceptance_turns_drafting_off_after_so_many_rounds():
    guard = CollapseGuard(FixedPolicy(7), rounds=50)
    world = _world(guard)
    made = world.run(100, [0.0] * 4)
    assert [budget.draft_budget for budget in made[:50]] == [7] * 50
    assert (made[50].draft_budget, made[50].reason) == (0, "collapsed")
    assert guard.active
    assert guard.num_fallbacks == 1


@pytest.mark.parametrize(("alpha", "falls"), [(0.02, True), (0.1, False)])
def test_it_is_the_accept_length_that_decides(alpha, falls):
    guard = CollapseGuard(FixedPolicy(3), accept_length=1.05)
    _world(guard).run(400, [alpha] * 4)
    assert guard.active == falls


@pytest.mark.parametrize("requests", [1, 8])
def test_it_comes_back_when_probes_are_accepted(requests):
    guard = CollapseGuard(FixedPolicy(7), rounds=50)
    world = _world(guard)
    world.run(500, [0.0] * requests)
    probes = [budget for budget in world.budgets if budget.reason == "probe"]
    assert probes
    assert {budget.draft_budget for budget in probes} == {7}
    world.run(1500, [0.6] * requests)
    assert not guard.active
    assert (world.budgets[-1].draft_budget, world.budgets[-1].reason) == (7, "fixed")
    assert guard.num_fallbacks == 1


def test_while_nothing_is_accepted_it_stays_off_and_probes_ever_less():
    guard = CollapseGuard(FixedPolicy(7), rounds=50)
    world = _world(guard)
    world.run(5000, [0.0] * 4)
    made = world.budgets[-2048:]
    assert guard.active
    assert sum(budget.reason == "probe" for budget in made) == 2
    assert switches(made) == 0


def test_zero_rounds_turn_it_off():
    guard = CollapseGuard(FixedPolicy(7), rounds=0)
    made = _world(guard).run(500, [0.0] * 4)
    assert {budget.draft_budget for budget in made} == {7}
    assert guard.num_fallbacks == 0


def test_rounds_that_did_not_draft_do_not_count():
    class Seldom(LoadPolicy):
        turn = 0

        def next(self, load: Load) -> Budget:
            self.turn += 1
            return Budget(3 if self.turn % 10 == 0 else 0, "seldom")

    guard = CollapseGuard(Seldom(), rounds=50)
    world = _world(guard)
    world.run(490, [0.0])
    assert not guard.active
    world.run(20, [0.0])
    assert guard.active


def test_it_needs_no_cost_table():
    guard = CollapseGuard(FixedPolicy(7), rounds=50)
    _world(guard, None).run(100, [0.0])
    assert guard.active


def test_state_holds_what_the_policy_knows_as_well():
    guard = CollapseGuard(FixedPolicy(7))
    _world(guard).run(10, [0.5])
    assert guard.state["guard"]["active"] is False
    assert guard.state["guard"]["accept_length"] > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accept_length": 0.9}, "accept_length must be at least 1, got 0.9"),
        ({"rounds": -1}, "rounds must be at least 0, got -1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CollapseGuard(FixedPolicy(1), **options)


class TestProbeTimes:
    def test_they_double_up_to_the_longest(self):
        probes = Probes(first=2, longest=8)
        due = [turn for turn in range(1, 40) if probes.due()]
        assert due == [2, 6, 14, 22, 30, 38]

    def test_a_probe_that_paid_is_followed_by_one_at_once(self):
        probes = Probes(first=4, longest=64)
        assert [probes.due() for _ in range(4)] == [False, False, False, True]
        probes.paid()
        assert probes.due()
        assert [probes.due() for _ in range(4)] == [False, False, False, True]

    def test_bad_times_are_refused(self):
        with pytest.raises(ValueError, match="probes need 1 <= first <= longest, got 4 and 2"):
            Probes(first=4, longest=2)
