"""Puts the budget scheduler of a scheduler process together: policies, costs, metrics, trace."""

from __future__ import annotations

import logging
import platform
from functools import partial
from typing import Any

import torch

from specstack.bind import BoundParts, build_part
from specstack.budget.base import Budget, BudgetPolicy
from specstack.budget.controller import BudgetController, Policies
from specstack.budget.cost_store import cost_key, load_table, machine_name, read_table
from specstack.budget.cost_table import CostKey, CostTable, CostTableError
from specstack.budget.costs import CostModel
from specstack.budget.guard import CollapseGuard
from specstack.head_facts import head_digest
from specstack.metrics.trace import TraceWriter
from specstack.plan import FallbackPlan, PartPlan, Plan
from specstack_serving import sglang_compat as sgl
from specstack_serving.control import Control
from specstack_serving.exporter import RoundExporter
from specstack_serving.reporting import RoundReporter

logger = logging.getLogger(__name__)


def budget_command(plan: Plan) -> dict[str, Any]:
    """What of a plan a running scheduler can be told: JSON, for `policies_of`."""
    return {
        "budget": plan.budget.model_dump(mode="json"),
        "shadow": plan.shadow and plan.shadow.model_dump(mode="json"),
        "fallback": plan.fallback.model_dump(mode="json"),
        "budgets": list(plan.shapes.draft_budgets),
        "info": plan_labels(plan),
    }


def policies_of(command: dict[str, Any], acting: BudgetPolicy | None = None) -> Policies:
    """Build what a command describes; `acting`, if given, is its budget, built already."""
    budget = PartPlan.model_validate(command["budget"])
    shadow = command["shadow"] and PartPlan.model_validate(command["shadow"])
    fallback = FallbackPlan.model_validate(command["fallback"])
    return Policies(
        acting=build_part(budget) if acting is None else acting,
        budgets=tuple(command["budgets"]),
        shadow=build_part(shadow) if shadow else None,
        guard=partial(CollapseGuard, accept_length=fallback.accept_length, rounds=fallback.rounds),
        name=budget.kind,
        shadow_name=shadow.kind if shadow else "",
    )


def needs_costs(plan: Plan) -> bool:
    """Whether a policy of the plan decides by what rounds cost."""
    return any(part is not None and "costs" in part.options for part in (plan.budget, plan.shadow))


def make_control(plan: Plan, parts: BoundParts) -> Control:
    """Everything around the rounds of one scheduler process."""
    key = key_of(plan)
    ragged = plan.engine.attention_backend == "specstack_cpu"
    table = stored_table(plan, key)
    costs = CostModel(table, ragged=ragged)
    policies = policies_of(budget_command(plan), parts.budget_policy)
    group, rank = sgl.get_parallel().tp_group, sgl.get_parallel().tp_rank
    exporter = RoundExporter(
        plan.metrics,
        sgl.get_serving().served_model_name,
        enabled=sgl.get_observability().enable_metrics and rank == 0,
        drafters=plan.merged_drafters,
    )
    if exporter.enabled:
        exporter.identify(plan_labels(plan), head_labels(plan))

    def agree(budget: Budget) -> Budget:
        if group.world_size == 1:
            return budget
        agreed: Budget = group.broadcast_object(budget if rank == 0 else None, src=0)
        return agreed

    reporter = RoundReporter(
        BudgetController(policies, costs, ragged=ragged),
        exporter,
        _trace(plan, key) if rank == 0 else None,
        agree,
    )
    return Control(
        reporter,
        key,
        policies_of,
        max_draft_budget=plan.shapes.max_draft_budget,
        is_first_rank=rank == 0,
    )


def plan_labels(plan: Plan) -> dict[str, str]:
    """Of `plan_info`."""
    return {
        "plan_hash": plan.hash[:12],
        "drafter": plan.drafter.kind,
        "tree": plan.tree.kind,
        "verify": plan.verify.kind,
        "budget": plan.budget.kind,
    }


def head_labels(plan: Plan) -> list[dict[str, str]]:
    """Of `head_info`, per head; reads the weights."""
    members, heads = plan.drafter.options.get("of"), []
    for head in plan.heads:
        options = plan.drafter.options
        if members is not None:
            options = members[int(head.place.rsplit(".", 1)[1])]["options"]
        digest = head_digest(options["checkpoint"]) or "unknown"
        heads.append({"place": head.place, "form": head.form, "digest": digest})
    return heads


def key_of(plan: Plan) -> CostKey:
    """What the times of this process depend on."""
    name = machine_name()
    if plan.engine.device == "cuda":
        name = torch.cuda.get_device_name()
    return cost_key(plan, name, torch.get_num_threads(), sgl.SGLANG_VERSION)


def stored_table(plan: Plan, key: CostKey) -> CostTable | None:
    """The table that the pipeline names, or the one that was measured here before.

    Raises:
        CostTableError: the pipeline names one that does not fit.
    """
    parts = [part for part in (plan.budget, plan.shadow) if part is not None]
    named = next((part.options["costs"] for part in parts if "costs" in part.options), "auto")
    if named != "auto":
        return read_table(named, key)
    try:
        return load_table(key)
    except CostTableError as error:
        logger.warning("specstack: %s", error)
        return None


def _trace(plan: Plan, key: CostKey) -> TraceWriter | None:
    folder = plan.metrics.trace
    if folder is None:
        return None
    header = {
        "plan_hash": plan.hash,
        "model": plan.target.model,
        "budget": plan.budget.model_dump(mode="json"),
        "choices": list(plan.shapes.draft_budgets),
        "max_running_requests": plan.engine.max_running_requests,
        "cost_key": key.model_dump(),
        "host": platform.node(),
    }
    return TraceWriter(folder, header, max_bytes=plan.metrics.trace_mib * 2**20)
