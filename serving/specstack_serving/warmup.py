"""Measures what rounds cost when a server starts that needs to know and does not.

Runs in the HTTP process after the engine's own warm-up and before the server calls itself ready:
the coarse sweep of `cost_sweep`, over HTTP like any client. A server whose sweep fails serves all
the same, plainly until a table is there.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx

from specstack_serving import sglang_compat as sgl
from specstack_serving.address import base_url
from specstack_serving.budgeting import needs_costs
from specstack_serving.carrier import current_plan
from specstack_serving.cost_sweep import (
    SweepError,
    groups_of,
    server_status,
    sweep,
    vocab_to_send,
)

logger = logging.getLogger(__name__)

COMMAND = "specstack serve (coarse)"
"""What a table measured here says of its origin."""


def launch_measuring(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the server's launch: its warm-up ends with a measurement."""
    plan = current_plan()
    assert plan is not None
    if needs_costs(plan):
        kwargs.setdefault("execute_warmup_func", _warm_up)
    return original(*args, **kwargs)


def _warm_up(server_args: Any) -> bool:
    """The engine's warm-up, then ours; False: the engine's failed."""
    if not sgl.execute_server_warmup(server_args):
        return False
    manager = sgl.get_global_state().tokenizer_manager
    manager.server_status = sgl.ServerStatus.Starting
    try:
        _measure_costs()
    finally:
        manager.server_status = sgl.ServerStatus.Up
    return True


def _measure_costs() -> None:
    plan, serving = current_plan(), sgl.get_serving()
    assert plan is not None
    url, key = base_url(plan.engine.host, plan.engine.port), serving.api_key
    admin_key = serving.admin_api_key or key
    try:
        status = server_status(url, key)
        if status["costs"]["source"] != "none":
            return
        logger.info("specstack: no cost table for this machine yet: measuring a coarse one")
        groups = groups_of(plan, status, coarse=True)
        measured = sweep(
            url, groups, command=COMMAND, api_key=key, admin_key=admin_key,
            vocab_size=vocab_to_send(plan),
        )  # fmt: skip
        asyncio.run(measured)
        logger.info("specstack: `specstack bench cost` measures a finer one")
    except (SweepError, httpx.HTTPError) as error:
        logger.warning("specstack: no cost table, drafts wait for one: %s", error)
