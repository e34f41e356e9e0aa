"""Another budget for a running plan goes through everything that the pipeline went through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specstack.plan import Plan, plan_file
from specstack.replan import BudgetChangeError, replanned
from specstack_dsl import SpecError

PIPELINE = """
version: 1
target: packaged:smollm2-135m-instruct
drafter: {kind: ngram, max_match: 8}
tree: {kind: best_first, depth: 8}
budget: {kind: goodput, choices: [0, 1, 3, 7], dwell_rounds: 8}
engine: {device: cpu}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "served.yaml"
    path.write_text(PIPELINE)
    return path


@pytest.fixture
def plan(file: Path) -> Plan:
    return plan_file(file, ["tree.depth=7"])


def test_what_a_section_leaves_out_stays(plan: Plan) -> None:
    changed = replanned(plan, plan, {"hysteresis": 0.1})
    assert changed.budget.options == {**plan.budget.options, "hysteresis": 0.1}
    assert changed.hash != plan.hash
    assert changed.drafter == plan.drafter, "the override of the command line stays"
    again = replanned(plan, changed, {"dwell_rounds": 2})
    assert again.budget.options["hysteresis"] == 0.1
    assert again.budget.options["dwell_rounds"] == 2


def test_another_kind_replaces_the_section(plan: Plan) -> None:
    changed = replanned(plan, plan, {"kind": "fixed", "draft_budget": 3})
    assert changed.budget.kind == "fixed"
    assert changed.shapes.draft_budgets == (0, 3)


def test_a_shadow_is_added_and_taken_away(plan: Plan) -> None:
    changed = replanned(plan, plan, {"shadow": {"kind": "fixed", "draft_budget": 3}})
    assert changed.shadow is not None
    assert replanned(plan, changed, {"shadow": None}).shadow is None


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"dwell": 3}, "budget.dwell"),
        ({"hysteresis": 2}, "budget.hysteresis"),
        ({"kind": "goodputt"}, "budget.kind"),
        ({"choices": [0, 3, 1]}, "budget.choices"),
        ({"shadow": {"kind": "fixed", "draft_budget": 9}}, "budget.shadow"),
    ],
)
def test_a_wrong_section_is_refused_as_in_a_file(
    plan: Plan, section: dict[str, Any], path: str
) -> None:
    with pytest.raises(SpecError) as error:
        replanned(plan, plan, section)
    assert [problem.path for problem in error.value.problems] == [path]


def test_more_drafts_than_the_server_was_started_for_are_refused(plan: Plan) -> None:
    with pytest.raises(BudgetChangeError, match=r"8 drafts are more than the 7 .* restart"):
        replanned(plan, plan, {"kind": "fixed", "draft_budget": 8})
    fewer = replanned(plan, plan, {"kind": "fixed", "draft_budget": 3})
    assert replanned(plan, fewer, {"draft_budget": 7}).shapes.max_draft_budget == 7


def test_captured_widths_are_the_only_ones_where_there_are_graphs(plan: Plan) -> None:
    engine = plan.engine.model_copy(update={"device": "cuda"})
    running = plan.model_copy(update={"engine": engine})
    with pytest.raises(BudgetChangeError, match="no verify step was made for 5 drafts"):
        replanned(running, plan, {"kind": "fixed", "draft_budget": 5})
    assert replanned(plan, plan, {"kind": "fixed", "draft_budget": 5}), "a CPU has all widths"


def test_a_file_that_changed_since_is_not_read_again_silently(plan: Plan, file: Path) -> None:
    file.write_text(PIPELINE.replace("max_match: 8", "max_match: 9"))
    with pytest.raises(BudgetChangeError, match="not what this server was started with"):
        replanned(plan, plan, {"hysteresis": 0.1})


def test_changes_do_not_pile_up_and_the_files_kind_comes_back_as_it_was(plan: Plan) -> None:
    changed = plan
    for step in range(1, 6):
        changed = replanned(plan, changed, {"hysteresis": step / 100})
    changed = replanned(plan, changed, {"fallback": {"rounds": 9}})
    changed = replanned(plan, changed, {"fallback": {"accept_length": 1.5}})
    assert changed.source is not None
    assert plan.source is not None
    assert len(changed.source.overrides) == len(plan.source.overrides) + 1
    assert changed.budget.options["hysteresis"] == 0.05
    assert (changed.fallback.rounds, changed.fallback.accept_length) == (9, 1.5)
    fixed = replanned(plan, changed, {"kind": "fixed", "draft_budget": 3})
    assert replanned(plan, fixed, {"kind": "goodput"}).budget == plan.budget


def test_a_plan_without_a_file_says_so(plan: Plan) -> None:
    alone = plan.model_copy(update={"source": None})
    with pytest.raises(BudgetChangeError, match="not started from a pipeline file"):
        replanned(alone, alone, {"hysteresis": 0.1})
