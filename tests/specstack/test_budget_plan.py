"""Budgets of a pipeline in the plan: choices, costs, fallback and shadow."""

from __future__ import annotations

from pathlib import Path

import pytest

from specstack.bind import bind, build_part
from specstack.budget.ema import EmaPolicy
from specstack.budget.goodput import GoodputPolicy
from specstack.budget.slo import SloPolicy
from specstack.facts import HostFacts
from specstack.plan import FallbackPlan, Plan, compile
from specstack_dsl import loads

CPU = HostFacts(accelerator="none", num_accelerators=0, memory_bytes=16 * 2**30, num_cpus=4)


def plan(budget: str, more: str = "", file: str = "<text>") -> Plan:
    text = f"version: 1\ntarget: org/m\nbudget: {budget}\n{more}"
    return compile(loads(text, file), model_facts=None, host_facts=CPU)


@pytest.mark.parametrize(
    ("budget", "policy"),
    [
        ("{kind: goodput, choices: [0, 2, 9], max_context: 100}", GoodputPolicy),
        ("{kind: slo, choices: [0, 2, 9], tpot_ms: 30}", SloPolicy),
        ("{kind: ema, choices: [2, 9]}", EmaPolicy),
    ],
)
def test_options_are_the_arguments_of_the_policy(budget, policy):
    made = plan(budget)
    assert isinstance(bind(made).budget_policy, policy)
    assert made.shapes.draft_budgets == (0, 2, 9)
    assert {3, 10} <= set(made.shapes.verify_widths)
    assert made.shapes.max_draft_budget == 9


def test_fallback_and_shadow_are_not_the_policys():
    made = plan(
        "{kind: fixed, draft_budget: 5, fallback: {rounds: 7}, shadow: {kind: ema, choices: [3]}}"
    )
    assert made.budget.options == {"draft_budget": 5, "min_survival": 0.0}
    assert made.fallback == FallbackPlan(accept_length=1.05, rounds=7)
    assert made.shadow is not None
    assert isinstance(build_part(made.shadow), EmaPolicy)
    assert made.shapes.draft_budgets == (0, 3, 5)
    assert made.origins["budget.fallback.rounds"] == "<text>:3"
    assert made.origins["budget.fallback.accept_length"] == "default"
    assert made.origins["budget.shadow.choices"] == "<text>:3"


def test_a_shadow_adds_no_verify_width():
    shadow = plan("{kind: fixed, draft_budget: 8, shadow: {kind: fixed, draft_budget: 5}}")
    assert 6 not in shadow.shapes.verify_widths
    acting = plan("{kind: goodput, choices: [0, 5, 8]}")
    assert 6 in acting.shapes.verify_widths  # control


def test_a_shadow_may_be_a_table():
    made = plan(
        "{kind: fixed, draft_budget: 8,"
        " shadow: {kind: table, rows: [{max_batch: 4, draft_budget: 2}]}}"
    )
    assert made.shadow is not None
    assert build_part(made.shadow) is not None


def test_costs_are_found_beside_the_file(tmp_path: Path):
    budget = "{kind: goodput, choices: [0, 1], costs: ./times.json}"
    made = plan(budget, file=str(tmp_path / "pipeline.yaml"))
    assert made.budget.options["costs"] == str(tmp_path / "times.json")
    assert plan("{kind: goodput, choices: [0, 1]}").budget.options["costs"] == "auto"


def test_the_hash_names_the_decisions_and_no_local_path():
    budget = "{kind: goodput, choices: [0, 1], costs: ./%s}"
    assert plan(budget % "a.json").hash == plan(budget % "b.json").hash
    one = "{kind: fixed, draft_budget: 4, fallback: {rounds: %d}}"
    assert plan(one % 10).hash != plan(one % 20).hash


def test_a_plan_survives_json():
    made = plan("{kind: fixed, draft_budget: 5, shadow: {kind: goodput, choices: [0, 3]}}")
    assert Plan.model_validate_json(made.model_dump_json()) == made
