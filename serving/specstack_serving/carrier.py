"""How the plan reaches every process: inline JSON in one environment variable.

SGLang starts its processes with `spawn`, which inherits the environment; the platform plug-in
needs the plan before any server argument is parsed, so nothing else can carry it.
"""

from __future__ import annotations

import os
from functools import cache

from specstack.plan import Plan

PLAN_VARIABLE = "SPECSTACK_PLAN"


def export_plan(plan: Plan) -> None:
    """Make `plan` the plan of this process and of all that it starts."""
    os.environ[PLAN_VARIABLE] = plan.model_dump_json()
    current_plan.cache_clear()


@cache
def current_plan() -> Plan | None:
    """The exported plan, or None when this process was not started by specstack."""
    text = os.environ.get(PLAN_VARIABLE)
    return Plan.model_validate_json(text) if text else None
