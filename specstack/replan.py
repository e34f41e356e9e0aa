"""Another budget for a running plan: the pipeline's text again, with a changed budget section."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specstack.plan import Plan, plan_file


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
    changed = plan_file(source.file, [*source.overrides, f"budget={json.dumps(section)}"])
    shapes = running.shapes
    if changed.shapes.max_draft_budget > shapes.max_draft_budget:
        raise BudgetChangeError(
            f"budget: {changed.shapes.max_draft_budget} drafts are more than the"
            f" {shapes.max_draft_budget} that this server was started for: restart it"
        )
    missing = {1 + budget for budget in changed.shapes.draft_budgets} - set(shapes.verify_widths)
    if missing and running.engine.device != "cpu":
        known = ", ".join(str(width - 1) for width in shapes.verify_widths)
        raise BudgetChangeError(
            f"budget: no verify step was made for {', '.join(str(w - 1) for w in sorted(missing))}"
            f" drafts: choose from {known}, or restart the server"
        )
    return changed
