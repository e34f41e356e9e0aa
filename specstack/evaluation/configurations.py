"""What is compared: trees and budgets, each a pipeline of its own with a plan and a hash.

The drafter is the pipeline's. A chain as deep as the tree is always among them, for alpha_k.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specstack.bind import bind
from specstack.budget.base import Budget, Load
from specstack.evaluation.errors import EvaluationError
from specstack.facts import HostFacts
from specstack.plan import Plan, plan_file
from specstack_dsl import Pipeline, load
from specstack_dsl.errors import did_you_mean
from specstack_dsl.parts import TreePart, catalogue

CHAIN, BEST_FIRST = "chain", "best_first"
UNPRICED = {"calibration": None, "cost": None}


@dataclass(frozen=True)
class Configuration:
    """One tree builder with one budget."""

    plan: Plan
    budget: Budget

    @property
    def name(self) -> str:
        """Names it in tables."""
        price = self.budget.min_survival
        return f"{self.plan.tree.kind} {self.budget.draft_budget}" + (
            f" above {price:g}" if price else ""
        )

    @property
    def reach(self) -> int:
        """Deepest draft of any tree."""
        return min(self.budget.draft_budget, self.plan.shapes.max_depth)


@dataclass(frozen=True)
class Grid:
    """All configurations of an evaluation."""

    configurations: tuple[Configuration, ...]
    chain: Configuration
    """The one that alpha_k is read from; among the others."""


def grid(
    file: Path,
    overrides: Sequence[str],
    *,
    trees: Sequence[str],
    budgets: Sequence[int],
    min_survival: float,
    load_of_policy: int,
) -> Grid:
    """Compile them; without trees, the pipeline's; without budgets, what its policy gives.

    Raises:
        EvaluationError: the pipeline does not speculate, or a tree is unknown.
        SpecError, PlanError: a configuration does not fit.
    """
    pipeline = _speculating(file, overrides)
    known = catalogue()["tree"]
    for kind in trees:
        if kind not in known:
            hint = did_you_mean(kind, known)
            raise EvaluationError(f"--tree {kind}: expected one of {', '.join(known)}{hint}")

    def compiled(kind: str, draft_budget: int, price: float = min_survival) -> Configuration:
        tree = _tree(pipeline, kind)
        limit = _most_nodes(file, overrides, tree)
        draft_budget = draft_budget if limit is None else min(draft_budget, limit)
        return _compiled(file, overrides, tree, Budget(draft_budget, "fixed", price))

    wanted: dict[str, Configuration] = {}
    for kind in trees or (pipeline.tree.kind,):
        for draft_budget in budgets:
            made = compiled(kind, draft_budget)
            wanted.setdefault(made.name, made)
    if not budgets:
        for kind in trees or (pipeline.tree.kind,):
            own = _own_budget(file, overrides, load_of_policy)
            made = own if kind == pipeline.tree.kind else compiled(kind, own.budget.draft_budget)
            wanted.setdefault(made.name, made)
    depth = pipeline.tree.max_depth
    tree = {"kind": CHAIN, "depth": depth, **UNPRICED}
    chain = _compiled(file, overrides, tree, Budget(depth, "fixed"))
    wanted.setdefault(chain.name, chain)
    return Grid(tuple(wanted.values()), wanted[chain.name])


def uncalibrated(file: Path, overrides: Sequence[str], draft_budget: int) -> Configuration:
    """Compile the best paths as deep as the pipeline's tree, at the drafter's own word.

    Raises:
        EvaluationError: nothing is drafted, or nothing chosen among drafts.
        SpecError, PlanError: the configuration does not fit.
    """
    pipeline = _speculating(file, overrides)
    if "draft_law" in pipeline.drafter.provided:
        raise EvaluationError(
            f"{file}: drawn drafts are verified whatever they are worth, so that there is nothing"
            " to calibrate: set drafter.drafts to best"
        )
    tree = {"kind": BEST_FIRST, "depth": pipeline.tree.max_depth, "width": None, **UNPRICED}
    return _compiled(file, overrides, tree, Budget(draft_budget, "fixed"))


def _speculating(file: Path, overrides: Sequence[str]) -> Pipeline:
    pipeline = load(file, overrides)
    if not pipeline.speculates:
        raise EvaluationError(f"{file}: the drafter is none, so that there is nothing to evaluate")
    return pipeline


def _compiled(
    file: Path, overrides: Sequence[str], tree: Mapping[str, Any], given: Budget
) -> Configuration:
    budget = {
        "kind": "fixed",
        "draft_budget": given.draft_budget,
        "min_survival": given.min_survival,
    }
    changed = _replaced(overrides, tree=tree, budget=budget)
    return Configuration(plan_file(file, changed, host_facts=HostFacts.unknown()), given)


def _replaced(overrides: Sequence[str], **sections: Mapping[str, Any]) -> list[str]:
    """Overrides that set whole sections, and say nothing else about them."""
    kept = [
        override
        for override in overrides
        if override.partition("=")[0].strip().partition(".")[0] not in sections
    ]
    return [*kept, *(f"{name}={json.dumps(value)}" for name, value in sections.items())]


def _own_budget(file: Path, overrides: Sequence[str], num_running: int) -> Configuration:
    plan = plan_file(file, overrides, host_facts=HostFacts.unknown())
    budget = bind(plan).budget_policy.next(Load(num_running))
    if budget.draft_budget == 0:
        raise EvaluationError(
            f"{file}: its policy drafts nothing at a load of {num_running}: give --load or --budget"
        )
    return Configuration(plan, budget)


def _tree(pipeline: Pipeline, kind: str) -> dict[str, Any]:
    """The tree with the pipeline's options, as far as this kind has them."""
    own: TreePart = pipeline.tree
    options = own.model_dump(mode="json")
    if options.get("calibration") is not None:  # a file beside the pipeline, not an override
        stated = pipeline.position("tree.calibration").resolve(options["calibration"])
        options["calibration"] = str(stated)
    if kind != own.kind:
        fields = catalogue()["tree"][kind].model_fields
        options = {n: v for n, v in options.items() if n in fields and v is not None}
    return {**options, "kind": kind}


def _most_nodes(file: Path, overrides: Sequence[str], tree: dict[str, Any]) -> int | None:
    """Most drafts that such a tree holds."""
    changed = _replaced(overrides, tree=tree, budget={"kind": "fixed", "draft_budget": 1})
    most: int | None = load(file, changed).tree.max_nodes
    return most
