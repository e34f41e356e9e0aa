"""Another budget for a running plan: the pipeline's text again, with a changed budget section."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specstack.plan import Plan, plan_file

OVERRIDE = "budget="


class BudgetChangeError(ValueError):
    """A budget that a running server cannot take; the text says why and what to do."""


def replanned(running: Plan, current: Plan, section: Mapping[str, Any]) -> Plan:
    """Return the plan with `section` merged into its budget; another kind replaces it.

    Args:
        running: the plan that the server was started with, whose shapes are there.
        current: the same, with the budget of the last change.
        section: of the budget: what `--set budget=` would take, as data.

    Raises:
        SpecError, PlanError: as for a pipeline file.
        BudgetChangeError: the file has changed since, or the shapes would have to.
    """
    source = current.source
    if source is None:
        raise BudgetChangeError("the server was not started from a pipeline file: restart it")
    if plan_file(source.file, source.overrides).hash != current.hash:
        raise BudgetChangeError(
            f"{source.file} is not what this server was started with any more: restart it"
        )
    stated = list(running.source.overrides) if running.source else []
    made = [text.removeprefix(OVERRIDE) for text in source.overrides[len(stated) :]]
    merged = _merged(json.loads(made[0]) if made else {}, section, current.budget.kind)
    changed = plan_file(source.file, [*stated, OVERRIDE + json.dumps(merged)])
    named = _named_costs(changed)
    if named and named != _named_costs(running):
        raise BudgetChangeError(
            f"budget.costs: {', '.join(sorted(named))} is read when a server starts: restart it"
        )
    shapes = running.shapes
    if changed.shapes.max_draft_budget > shapes.max_draft_budget:
        raise BudgetChangeError(
            f"budget: {changed.shapes.max_draft_budget} drafts are more than the"
            f" {shapes.max_draft_budget} that this server was started for: restart it"
        )
    missing = set(changed.shapes.verify_widths) - set(shapes.verify_widths)
    if missing and running.engine.device != "cpu":
        known = ", ".join(str(width - 1) for width in shapes.verify_widths)
        raise BudgetChangeError(
            f"budget: no verify step was made for {', '.join(str(w - 1) for w in sorted(missing))}"
            f" drafts: choose from {known}, or restart the server"
        )
    return changed


def _named_costs(plan: Plan) -> set[str]:
    """Files of cost tables that a plan's policies name."""
    parts = [part for part in (plan.budget, plan.shadow) if part is not None]
    return {costs for part in parts if (costs := part.options.get("costs", "auto")) != "auto"}


def _merged(before: dict[str, Any], change: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """`change` over what was changed before; another kind starts anew."""
    if change.get("kind", kind) != kind:
        return dict(change)
    return {**before, **{name: _over(before.get(name), value) for name, value in change.items()}}


def _over(before: Any, value: Any) -> Any:
    if isinstance(before, dict) and isinstance(value, dict):
        return _merged(before, value, str(before.get("kind", value.get("kind"))))
    return value
