"""`/specstack`: what the scheduler does and why, and changes of it without a restart.

Runs in the HTTP process. A change is validated by the language's own rules, as the pipeline file
was, before the scheduler hears of it. Who may make one is SGLang's own rule for its admin routes:
the admin key, else the API key, else (neither is set) anybody who reaches the server.
"""

import asyncio
import itertools
import json
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from specstack.plan import Plan
from specstack.replan import BudgetChangeError, replanned
from specstack_dsl import PlanError, SpecError
from specstack_serving import sglang_compat as sgl
from specstack_serving.budgeting import budget_command, needs_costs
from specstack_serving.control import command_key

FORCE = "force"


class Routes:
    """The endpoints, over the plan that the server was started with."""

    def __init__(self, plan: Plan) -> None:
        self._started = self._plan = plan
        self._numbers = itertools.count(1)
        self._one_at_a_time = asyncio.Lock()

    def install(self) -> None:
        """Add them to the engine's app."""
        admin = sgl.auth_level(sgl.AuthLevel.ADMIN_OPTIONAL)
        for path, method, handler in (
            ("/specstack/status", "GET", self.status),
            ("/specstack/budget", "POST", admin(_bound(self.set_budget))),
            ("/specstack/costs", "POST", admin(_bound(self.set_costs))),
        ):
            sgl.http_app.add_api_route(path, handler, methods=[method], response_model=None)

    async def status(self) -> Any:
        """What is decided now, and on what grounds."""
        return _json(200, self._described(await _state()))

    async def set_budget(self, body: Any) -> Any:
        """Take a budget section (what it leaves out stays).

        Or `{"force": n | null}`, for good or with `"seconds"`.
        """
        if FORCE in body:
            if problem := self._force_problem(body):
                return _refused([problem])
            command = {FORCE: body[FORCE], "seconds": body.get("seconds")}
            async with self._one_at_a_time:
                return await self._command(command)
        async with self._one_at_a_time:
            try:
                plan = await asyncio.to_thread(replanned, self._started, self._plan, body)
            except (SpecError, PlanError) as error:
                return _refused([f"{p.path}: {p.message}" for p in error.problems])
            except BudgetChangeError as error:
                return _refused([str(error)])
            return await self._command({"budget": budget_command(plan)}, plan)

    async def set_costs(self, body: Any) -> Any:
        """Take `{"samples": "clear"}` or `{"fit": {"command": text}}`."""
        fit = body.get("fit")
        is_fit = set(body) == {"fit"} and isinstance(fit, dict) and set(fit) == {"command"}
        if not is_fit and body != {"samples": "clear"}:
            return _refused(['expected {"samples": "clear"} or {"fit": {"command": "..."}}'])
        async with self._one_at_a_time:
            return await self._command(body)

    def _force_problem(self, body: dict[str, Any]) -> str | None:
        value, seconds = body[FORCE], body.get("seconds")
        if set(body) - {FORCE, "seconds"}:
            return 'expected a budget section, or {"force": n | null} with or without "seconds"'
        if seconds is not None and not (type(seconds) in (int, float) and seconds > 0):
            return f"seconds: expected a number above 0, found {seconds!r}"
        shapes = self._started.shapes
        allowed = tuple(width - 1 for width in shapes.verify_widths)
        if self._plan.engine.device == "cpu":
            allowed = tuple(range(shapes.max_draft_budget + 1))
        if value is None or (type(value) is int and value in allowed):
            return None
        return f"force: expected null or one of {', '.join(map(str, allowed))}, found {value!r}"

    async def _command(self, command: dict[str, Any], plan: Plan | None = None) -> Any:
        """Have the scheduler obey; then `plan` is what runs."""
        number = next(self._numbers)
        key = command_key({"number": number, **command})
        request = sgl.SetInternalStateReq(server_args={key: number})
        updated = await sgl.get_global_state().tokenizer_manager.set_internal_state(request)
        state = await _state()
        answer = state["answer"]
        if not all(updated) or answer.get("number") != number:
            return _refused(["the scheduler did not take the command: see the server's log"])
        if "error" in answer:
            return _refused([answer["error"]])
        if plan is not None:
            self._plan = plan
        return _json(200, {**self._described(state), **answer})

    def _described(self, state: dict[str, Any]) -> dict[str, Any]:
        plan = self._plan
        return {
            "plan_hash": plan.hash,
            **state,
            "needs_costs": needs_costs(plan),
            "max_running_requests": plan.engine.max_running_requests,
        }


def _bound(method: Any) -> Any:
    """A function around a method: the engine marks endpoints with an attribute."""

    async def endpoint(request: Request) -> Any:
        try:
            body = json.loads(await request.body() or b"{}")
        except ValueError as error:
            return _refused([f"the body is not JSON: {error}"])
        if not isinstance(body, dict):
            return _refused([f"expected a JSON object, found {body!r}"])
        return await method(body)

    return endpoint


async def _state() -> dict[str, Any]:
    """What the scheduler says about itself; of several the first."""
    states = await sgl.get_global_state().tokenizer_manager.get_internal_state()
    state: dict[str, Any] = states[0]["specstack"]["live"]
    return state


def _json(code: int, content: dict[str, Any]) -> Any:
    return JSONResponse(content, status_code=code)


def _refused(problems: list[str]) -> Any:
    return _json(400, {"error": "; ".join(problems), "problems": problems})
