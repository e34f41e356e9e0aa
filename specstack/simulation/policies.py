"""`--policies`: from names to policies, built as serving builds them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specstack.bind import implementation
from specstack.budget.controller import BudgetController, Policies
from specstack.budget.costs import CostModel, CostTable
from specstack.budget.guard import CollapseGuard
from specstack.simulation.errors import SimulationError
from specstack_dsl import SpecError, load
from specstack_dsl.errors import did_you_mean
from specstack_dsl.parts import BudgetPart, catalogue

PLAIN, ORACLE = "plain", "oracle"
FIXED, TABLE = "fixed", "table"


@dataclass(frozen=True)
class Candidate:
    """A policy to simulate."""

    name: str
    part: BudgetPart | None
    """None: the oracle."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """What it may choose."""
        return () if self.part is None else tuple({0, *self.part.draft_budgets})

    def controller(self, costs: CostTable, *, ragged: bool) -> BudgetController | None:
        """A new controller, which knows the costs and nothing else; None: the oracle."""
        if self.part is None:
            return None
        acting = implementation(self.part.implementation)(**self.part.options)
        guard = partial(CollapseGuard, **self.part.fallback.model_dump())
        policies = Policies(acting, tuple(sorted(self.budgets)), guard=guard, name=self.part.kind)
        return BudgetController(policies, CostModel(costs, ragged=ragged), ragged=ragged)


def parse_policies(text: str, choices: tuple[int, ...]) -> list[Candidate]:
    """Return the candidates of a comma-separated list.

    Args:
        text: of `plain`, `oracle`, `fixed:7`, `table:2=15:8=3` (batch=budget), any other budget
            part as `KIND:OPTION=VALUE:..`, or a pipeline file (its budget).
        choices: of policies that choose, where they state none.

    Raises:
        SimulationError: names the policy and what is wrong.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise SimulationError("--policies: expected a list, for example plain,fixed:3,oracle")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SimulationError(f"--policies: {twice} is there twice")
    return [_parse(name, choices) for name in names]


def _parse(name: str, choices: tuple[int, ...]) -> Candidate:
    if name == ORACLE:
        return Candidate(name, None)
    if name.endswith((".yaml", ".yml")):
        try:
            return Candidate(Path(name).stem, load(name).budget)
        except SpecError as error:
            raise SimulationError(str(error)) from error
    kind, *options = name.split(":")
    if kind == PLAIN and not options:
        kind, options = FIXED, ["0"]
    parts = catalogue()["budget"]
    if kind not in parts:
        known = [PLAIN, ORACLE, *parts]
        raise SimulationError(
            f"--policies {name}: no policy {kind!r}{did_you_mean(kind, known)}; known:"
            f" {', '.join(known)}, or a pipeline file"
        )
    stated = _options(name, kind, options)
    part = parts[kind]
    if "choices" in part.model_fields:
        stated.setdefault("choices", choices if kind != "ema" else choices[1:])
    try:
        return Candidate(name, part.model_validate(stated))  # type: ignore[arg-type]
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        raise SimulationError(f"--policies {name}: {problems}") from error


def _options(name: str, kind: str, options: list[str]) -> dict[str, Any]:
    if kind == FIXED and len(options) == 1 and "=" not in options[0]:
        return {"draft_budget": _value(options[0])}
    pairs = [option.partition("=") for option in options]
    if bad := next((pair[0] for pair in pairs if not pair[1]), None):
        raise SimulationError(f"--policies {name}: expected OPTION=VALUE, found {bad!r}")
    if kind == TABLE:
        rows = [{"max_batch": _value(b), "draft_budget": _value(w)} for b, _, w in pairs]
        return {"rows": rows}
    return {key: _value(value) for key, _, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
