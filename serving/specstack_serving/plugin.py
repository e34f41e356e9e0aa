"""Entry point `sglang.srt.plugins`: runs once in every SGLang process, before arguments parse.

Does nothing unless a plan was exported, so that an installed specstack leaves other servers of
the same environment alone. SGLang only logs what a plug-in raises; `specstack serve` therefore
calls `register` itself first and lets its errors end the command.
"""

from __future__ import annotations

from functools import cache
from multiprocessing import parent_process
from typing import Any

from specstack_serving.carrier import current_plan


def register() -> None:
    """Register the algorithm and install the hooks that the plan needs. Runs once a process."""
    plan = current_plan()
    if plan is not None:
        _register(plan.hash)


@cache
def _register(plan_hash: str) -> None:
    plan = current_plan()
    assert plan is not None
    from specstack_serving import sglang_compat as sgl

    # First: SGLang picks its platform at import, ours, whose module must not be half imported.
    sgl.import_engine()
    if plan.engine.device == "cpu":
        from specstack_serving.cpu.platform import install

        install()
    if not plan.speculates:
        return
    from specstack.plan import ALGORITHM
    from specstack_serving.algorithm import SpecstackAlgo

    sgl.SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=SpecstackAlgo)(
        _worker_class
    )
    _install_hooks(sgl)


def _worker_class(server_args: Any) -> type:
    from specstack_serving.worker import SpecstackWorker

    return SpecstackWorker


def _install_hooks(sgl: Any) -> None:
    around = sgl.HookType.AROUND
    sgl.HookRegistry.register(
        sgl.target("get_req_to_token_extra_context_len"), _widen_request_row, around
    )
    sgl.HookRegistry.register(sgl.target("add_speculative_state"), _describe_plan, around)
    sgl.HookRegistry.register(sgl.target("state_update_handlers"), _obey_commands, around)
    from specstack_serving.load import watch_queue

    sgl.HookRegistry.register(sgl.target("Scheduler_run_batch"), watch_queue, around)
    if parent_process() is not None:
        return  # what follows is of the server's main process alone
    from specstack_serving.admission import validate_request
    from specstack_serving.warmup import launch_measuring

    sgl.HookRegistry.register(sgl.target("launch_server"), launch_measuring, around)

    sgl.HookRegistry.register(sgl.target("validate_one_request"), validate_request, around)


def _widen_request_row(original: Any, *args: Any, **kwargs: Any) -> int:
    """Give a request's row of the token table room for the whole decode reservation.

    SGLang reserves twice the verify width per request, but with one-token pages widens the row
    by four plus the width: near the context limit the writer runs into the next request's row.
    """
    from specstack_serving import sglang_compat as sgl

    return max(original(*args, **kwargs), sgl.get_alloc_reserve_per_decode() + 4)


def _describe_plan(original: Any, controller: Any, state: dict[str, Any]) -> Any:
    """Add the plan's identity to `/server_info` (internal_states)."""
    result = original(controller, state)
    plan = current_plan()
    assert plan is not None
    worker = controller.scheduler.draft_worker
    state["specstack"] = {
        "live": worker.control.state,
        "plan_hash": plan.hash,
        "drafter": plan.drafter.kind,
        "tree": plan.tree.kind,
        "verify": plan.verify.kind,
    }
    return result


def _obey_commands(original: Any, controller: Any) -> Any:
    """Take commands of `/specstack` among the engine's updates of its state."""
    from specstack_serving import sglang_compat as sgl
    from specstack_serving.control import CommandError, CommandHandlers

    def obey(key: str, value: Any) -> None:
        controller.scheduler.draft_worker.control.obey(key)

    def check(key: str, value: Any) -> None:
        try:
            controller.scheduler.draft_worker.control.check(key)
        except CommandError as error:
            raise sgl.UpdateRejected(str(error)) from None

    return CommandHandlers(original(controller), sgl.UpdateHandler(check, obey))
