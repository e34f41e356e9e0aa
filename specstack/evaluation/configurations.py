"""What is compared: trees and budgets, each a pipeline of its own with a plan and a hash.

The drafter is the pipeline's. A chain as deep as the tree is always among them, for alpha_k.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specstack.bind import bind
from specstack.budget.base import Budget, Load
from specstack.evaluation.errors import EvaluationError
from specstack.facts import HostFacts
from specstack.plan import Plan, plan_file
from specstack_dsl import load
from specstack_dsl.errors import did_you_mean
from specstack_dsl.parts import TreePart, catalogue

CHAIN = "chain"


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
        return min(self.budget.draft_budget, int(self.plan.tree.options["depth"]))


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
    pipeline = load(file, overrides)
    if not pipeline.speculates:
        raise EvaluationError(f"{file}: the drafter is none, so that there is nothing to evaluate")
    known = catalogue()["tree"]
    for kind in trees:
        if kind not in known:
            hint = did_you_mean(kind, known)
            raise EvaluationError(f"--tree {kind}: expected one of {', '.join(known)}{hint}")

    def compiled(kind: str, draft_budget: int, price: float = min_survival) -> Configuration:
        tree = _tree(pipeline.tree, kind)
        limit = _most_nodes(file, overrides, tree)
        draft_budget = draft_budget if limit is None else min(draft_budget, limit)
        budget = {"kind": "fixed", "draft_budget": draft_budget, "min_survival": price}
        changed = [*overrides, f"tree={json.dumps(tree)}", f"budget={json.dumps(budget)}"]
        plan = plan_file(file, changed, host_facts=HostFacts.unknown())
        return Configuration(plan, Budget(draft_budget, "fixed", price))

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
    chain = compiled(CHAIN, pipeline.tree.depth, 0.0)
    wanted.setdefault(chain.name, chain)
    return Grid(tuple(wanted.values()), wanted[chain.name])


def _own_budget(file: Path, overrides: Sequence[str], num_running: int) -> Configuration:
    plan = plan_file(file, overrides, host_facts=HostFacts.unknown())
    budget = bind(plan).budget_policy.next(Load(num_running))
    if budget.draft_budget == 0:
        raise EvaluationError(
            f"{file}: its policy drafts nothing at a load of {num_running}: give --load or --budget"
        )
    return Configuration(plan, budget)


def _tree(own: TreePart, kind: str) -> dict[str, Any]:
    """The tree with the pipeline's options, as far as this kind has them."""
    options = own.options
    if kind != own.kind:
        fields = catalogue()["tree"][kind].model_fields
        options = {name: value for name, value in options.items() if name in fields}
    given = {name: value for name, value in options.items() if value is not None}
    return {"kind": kind, **given}


def _most_nodes(file: Path, overrides: Sequence[str], tree: dict[str, Any]) -> int | None:
    """Most drafts that such a tree holds."""
    changed = [
        *overrides,
        f"tree={json.dumps(tree)}",
        'budget={"kind": "fixed", "draft_budget": 1}',
    ]
    most: int | None = load(file, changed).tree.max_nodes
    return most
