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


def build_part(part: PartPlan) -> Any:
    """Build one part from its options."""
    options = dict(part.options)
    if "of" in options:  # a merge is built of drafters
        options["of"] = [build_part(PartPlan.model_validate(member)) for member in options["of"]]
    return implementation(part.implementation)(**options)


def bind(plan: Plan) -> BoundParts:
    """Build every part of the plan from its options."""
    return BoundParts(
        drafter=build_part(plan.drafter) if plan.drafter.implementation else None,
        tree_builder=build_part(plan.tree),
        verify_rule=build_part(plan.verify),
        budget_policy=build_part(plan.budget),
    )
