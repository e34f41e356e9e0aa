"""Who decides, who watches, and what is foretold for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specstack.budget.base import Budget, BudgetRuntime, Load
from specstack.budget.controller import BudgetController, Policies
from specstack.budget.cost_table import CostKey, CostTable
from specstack.budget.costs import CostModel
from specstack.budget.fixed import FixedPolicy
from specstack.budget.guard import CollapseGuard
from specstack.metrics.record import RoundRecord

KEY = CostKey(device="d", model="m", drafter="n", engine="e", dtype="float32")
TABLE = CostTable(
    version=1,
    key=KEY,
    num_requests=(1, 2),
    draft_budgets=(0, 3),
    contexts=(0,),
    verify_ms=(((10.0,), (16.0,)), ((12.0,), (24.0,))),
    draft_ms=((0.0, 2.0), (0.0, 3.0)),
    num_rounds=10,
    measured_at="2026-01-01T00:00:00Z",
    command="by hand",
)


class Spy:
    """A policy that says what it is told to and notes what it hears."""

    def __init__(self, *budgets: Budget) -> None:
        self.budgets = list(budgets)
        self.heard: list[RoundRecord] = []
        self.runtime: BudgetRuntime | None = None

    def attach(self, runtime: BudgetRuntime) -> None:
        self.runtime = runtime

    def next(self, load: Load) -> Budget:
        return self.budgets.pop(0) if len(self.budgets) > 1 else self.budgets[0]

    def observe(self, record: RoundRecord) -> None:
        self.heard.append(record)

    @property
    def state(self) -> Mapping[str, Any]:
        return {"heard": len(self.heard)}


def a_round(budget: Budget, correct: tuple[int, ...] = (2, 0), step: float = 0.02) -> RoundRecord:
    """Two requests with three good drafts each, or none at budget 0."""
    offered = min(budget.draft_budget, 3)
    return RoundRecord(
        num_requests=2, num_opted_out=0, num_drafting=2 * (offered > 0),
        draft_budget=budget.draft_budget, reason=budget.reason, num_draft_tokens=1 + offered,
        nodes_per_depth=(2,) * offered, draft_seconds=0.002, build_seconds=0.0,
        verify_seconds=step - 0.003, accept_seconds=0.001, step_seconds=step,
        num_correct=correct if offered else (0, 0), num_drafts=(offered, offered),
        survivals=np.tile(np.array([0.8, 0.5, 0.2], np.float32)[:offered], (2, 1)),
        accept_ranks=np.array([[1, 2], [0, 0]])[:, : offered] if offered else np.zeros((2, 0), int),
        request_ids=("a", "b"), context_lens=(10, 20),
    )  # fmt: skip


def controller(acting: Any, shadow: Any = None, table: CostTable | None = TABLE) -> Any:
    policies = Policies(acting, (0, 3), shadow, name="spy", shadow_name="other")
    return BudgetController(policies, CostModel(table), ragged=True)


LOAD = Load(2, context_lens=(10, 20), request_ids=("a", "b"), speculating=(True, True))


def test_both_policies_decide_and_hear_and_one_acts() -> None:
    acting, shadow = Spy(Budget(3, "x")), Spy(Budget(0, "off"))
    control = controller(acting, shadow)
    assert control.next(LOAD) == Budget(3, "x")
    report = control.observe(a_round(Budget(3, "x")))
    assert report.decision.shadow == Budget(0, "off")
    assert len(acting.heard) == len(shadow.heard) == 1
    assert acting.runtime is not None
    assert shadow.runtime == acting.runtime, "the same costs and survivals"


def test_reports_belong_to_the_oldest_decision() -> None:
    """Under overlap the next round is decided before the last one is known."""
    control = controller(Spy(Budget(3, "one"), Budget(0, "two"), Budget(3, "three")))
    first, second = control.next(LOAD), control.next(LOAD)
    reports = [control.observe(a_round(first)), control.observe(a_round(second))]
    assert [r.decision.budget.reason for r in reports] == ["one", "two"]
    assert [r.is_switch for r in reports] == [False, True]


def test_a_forecast_knows_tokens_and_time_of_every_side() -> None:
    control = controller(Spy(Budget(3, "x")), Spy(Budget(0, "off")))
    for _ in range(2):
        control.next(LOAD)
        report = control.observe(a_round(Budget(3, "x")))
    sides = report.sides
    assert set(sides) == {"measured", "predicted", "plain", "shadow"}
    assert sides["measured"] == (4, 0.02)
    assert sides["plain"] == sides["shadow"]
    assert sides["plain"][0] == 2
    assert sides["plain"][1] == pytest.approx(0.012, rel=0.1)
    tokens, seconds = sides["predicted"]
    assert 2 < tokens <= 2 * (1 + 1.5)
    assert seconds == pytest.approx(0.027, rel=0.1), "24 ms and 3 of drafting, all verified"


@pytest.mark.parametrize(("budget", "asked"), [(0, 1), (3, 2)])
def test_sides_that_decode_plainly_share_one_forecast(
    monkeypatch: pytest.MonkeyPatch, budget: int, asked: int
) -> None:
    control = controller(Spy(Budget(budget, "x")), Spy(Budget(0, "off")))
    control.next(LOAD)
    times: list[Any] = []
    step_ms = control.costs.step_ms
    monkeypatch.setattr(control.costs, "step_ms", lambda *a: times.append(a) or step_ms(*a))
    sides = control.observe(a_round(Budget(budget, "x"))).sides
    assert len(times) == asked
    assert set(sides) == {"measured", "predicted", "plain", "shadow"}
    assert sides["shadow"] == sides["plain"]
    assert (sides["predicted"] == sides["plain"]) is (budget == 0)


def test_a_price_makes_a_cheaper_forecast() -> None:
    control = controller(Spy(Budget(3, "x")), Spy(Budget(3, "x", min_survival=0.3)))
    for _ in range(2):
        control.next(LOAD)
        report = control.observe(a_round(Budget(3, "x")))
    (tokens, seconds), (fewer, less) = report.sides["predicted"], report.sides["shadow"]
    assert fewer < tokens
    assert less < seconds


@pytest.mark.parametrize("table", [None, TABLE])
def test_nothing_is_foretold_without_a_table_or_for_untimed_steps(table: CostTable | None) -> None:
    control = controller(Spy(Budget(3, "x")), table=table)
    control.next(LOAD)
    record = a_round(Budget(3, "x"))
    report = control.observe(record if table is None else replace(record, step_seconds=None))
    assert report.sides == {}


def test_a_forced_budget_acts_until_it_is_lifted() -> None:
    control = controller(Spy(Budget(0, "off")))
    control.force(3)
    assert control.next(LOAD) == Budget(3, "forced")
    control.force(None)
    assert control.next(LOAD) == Budget(0, "off")


def test_nobody_drafts_where_all_opted_out() -> None:
    load = replace(LOAD, speculating=(False, False))
    assert controller(Spy(Budget(3, "x"))).next(load) == Budget(0, "idle")


def test_another_ranks_decision_is_the_one_that_is_reported() -> None:
    control = controller(Spy(Budget(3, "x")))
    control.next(LOAD)
    control.impose(Budget(0, "rank 0"))
    assert control.observe(a_round(Budget(0, "rank 0"))).decision.budget.reason == "rank 0"


def test_policies_change_while_rounds_are_under_way_and_learn_from_the_last_ones() -> None:
    control = controller(Spy(Budget(3, "x")))
    for _ in range(8):
        control.next(LOAD)
        control.observe(a_round(Budget(3, "x")))
    control.next(LOAD)
    replacement = Spy(Budget(1, "new"))
    control.use(Policies(replacement, (0, 1, 3), name="new"))
    assert control.next(LOAD).draft_budget == 1
    report = control.observe(a_round(Budget(3, "x")))  # decided by the one before
    assert report.decision.budget.reason == "x"
    assert replacement.runtime is not None
    window = replacement.runtime.survivals
    assert window.budgets.tolist() == [0, 1, 3]
    assert window.num_observed > 8, "what was known is known to the new window"
    control.forget()
    assert replacement.runtime.survivals.num_observed == 0
    assert control.status["acceptance"]["accept_length"] is None


def test_the_guard_acts_and_its_fallback_is_reported_once() -> None:
    policies = Policies(
        FixedPolicy(3), (0, 3), guard=lambda policy: CollapseGuard(policy, 1.05, rounds=4)
    )
    control = BudgetController(policies, CostModel(None), ragged=True)
    counts = []
    for _ in range(8):
        budget = control.next(LOAD)
        counts.append(control.observe(a_round(budget, correct=(0, 0))).num_fallbacks)
    assert sum(counts) == 1
    assert control.next(LOAD).reason == "collapsed"
    assert control.status["fallback"] == {"active": True, "count": 1}


def test_the_status_is_json_and_says_what_and_why() -> None:
    import json

    control = controller(Spy(Budget(3, "x", 0.25)), Spy(Budget(0, "off")))
    assert json.loads(json.dumps(control.status))["budget"] is None, "nothing was decided yet"
    control.next(LOAD)
    control.observe(a_round(Budget(3, "x")))
    status = json.loads(json.dumps(control.status))
    assert status["budget"] == {"draft_budget": 3, "reason": "x", "min_survival": 0.25}
    assert status["shadow"]["next"]["reason"] == "off"
    assert status["load"]["num_running"] == 2
    assert status["load"]["mean_context"] == 15
    assert status["rounds"] == 1
    assert status["choices"] == [0, 3]
    assert status["costs"]["key"] == KEY.digest
    assert status["acceptance"]["alpha"] == [0.5, 1.0]
    assert status["acceptance"]["accept_length"] == 2.0
    assert status["acceptance"]["contexts"]["<=256"]["accept_rate"] == pytest.approx(
        2 / 6, abs=1e-4
    )
