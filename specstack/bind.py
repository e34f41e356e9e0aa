"""The one place where names become objects: a plan's `module:Class` strings to live parts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specstack.plan import PartPlan, Plan

if TYPE_CHECKING:
    from specstack.budget.base import BudgetPolicy
    from specstack.drafters.base import Drafter
    from specstack.trees.base import TreeBuilder
    from specstack.verify.base import VerifyRule


@dataclass(frozen=True)
class BoundParts:
    """The parts of a round, ready to run."""

    drafter: Drafter | None
    """None: plain decoding."""
    tree_builder: TreeBuilder
    verify_rule: VerifyRule
    budget_policy: BudgetPolicy


def implementation(name: str) -> Any:
    """Return the class that `module:Class` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _build(part: PartPlan) -> Any:
    options = dict(part.options)
    if "of" in options:  # a merge is built of drafters
        options["of"] = [_build(PartPlan.model_validate(member)) for member in options["of"]]
    return implementation(part.implementation)(**options)


def bind(plan: Plan) -> BoundParts:
    """Build every part of the plan from its options."""
    return BoundParts(
        drafter=_build(plan.drafter) if plan.drafter.implementation else None,
        tree_builder=_build(plan.tree),
        verify_rule=_build(plan.verify),
        budget_policy=_build(plan.budget),
    )
