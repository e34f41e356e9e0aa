"""`/specstack`: from an HTTP body to the policies of a running scheduler, and back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from specstack.bind import bind
from specstack.budget.base import Load
from specstack.budget.controller import BudgetController
from specstack.budget.cost_table import CostKey
from specstack.budget.costs import CostModel
from specstack.metrics.record import RoundRecord
from specstack.plan import Plan, plan_file
from specstack_serving import sglang_compat as sgl
from specstack_serving.budgeting import budget_command, needs_costs, policies_of
from specstack_serving.control import CommandError, CommandHandlers, Control, command_key
from specstack_serving.exporter import RoundExporter
from specstack_serving.reporting import RoundReporter
from specstack_serving.routes import Routes

KEY = CostKey(device="d", model="m", drafter="n", engine="e", dtype="float32")
PIPELINE = """
version: 1
target: packaged:smollm2-135m-instruct
drafter: {kind: ngram, max_match: 8}
budget: {kind: goodput, choices: [0, 1, 3, 7]}
engine: {device: cpu}
"""
LOAD = Load(2, context_lens=(10, 20), request_ids=("a", "b"), speculating=(True, True))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "served.yaml"
    path.write_text(PIPELINE)
    return plan_file(path)


def make_control(plan: Plan) -> Control:
    policies = policies_of(budget_command(plan), bind(plan).budget_policy)
    controller = BudgetController(policies, CostModel(None), ragged=True)
    exporter = RoundExporter(plan.metrics, "m", enabled=False)
    reporter = RoundReporter(controller, exporter, None, lambda budget: budget)
    return Control(reporter, KEY, policies_of, max_draft_budget=7, is_first_rank=True)


class Manager:
    """SGLang's way from the HTTP process to the scheduler, without the processes between."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.obeys = True

    async def set_internal_state(self, request: Any) -> list[bool]:
        own = SimpleNamespace(validate=self._check, apply=self._apply)
        handlers = CommandHandlers({}, own)
        for key, value in request.server_args.items():
            assert isinstance(value, (int, float)), "all that the engine's messages carry"
            if self.obeys:
                handlers[key].validate(key, value)
                handlers[key].apply(key, value)
        return [self.obeys]

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return [{"specstack": {"live": json.loads(json.dumps(self.control.state))}}]

    def _check(self, key: str, value: Any) -> None:
        self.control.check(key)

    def _apply(self, key: str, value: Any) -> None:
        self.control.obey(key)


@pytest.fixture
def manager(plan: Plan) -> Manager:
    return Manager(make_control(plan))


@pytest.fixture
def client(
    plan: Plan, manager: Manager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[TestClient]:
    app = FastAPI()
    state = SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setattr(sgl, "http_app", app, raising=False)
    monkeypatch.setattr(sgl, "get_global_state", lambda: state, raising=False)
    monkeypatch.setattr(sgl, "SetInternalStateReq", SimpleNamespace, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Routes(plan).install()
    with TestClient(app) as client:
        yield client


def rounds(control: Control, num_rounds: int, budget: int, step: float) -> None:
    """Rounds of two requests as the scheduler would report them."""
    controller = control.reporter.controller
    for _ in range(num_rounds):
        controller.next(LOAD)
        controller.observe(
            RoundRecord(
                num_requests=2, num_opted_out=0, num_drafting=2 * (budget > 0),
                draft_budget=budget, reason="forced", num_draft_tokens=1 + budget,
                nodes_per_depth=(2,) * budget, draft_seconds=0.001 * (budget > 0),
                build_seconds=0.0, verify_seconds=step, accept_seconds=0.0, step_seconds=step,
                num_correct=(0, 0), num_drafts=(budget, budget),
                survivals=np.full((2, budget), 0.5, np.float32),
                accept_ranks=np.zeros((2, 1), np.int64), context_lens=(10, 20),
            )
        )  # fmt: skip


def test_the_status_says_what_runs_and_why(client: TestClient, plan: Plan) -> None:
    status = client.get("/specstack/status").json()
    assert status["plan_hash"] == plan.hash
    assert status["policy"]["kind"] == "goodput"
    assert status["choices"] == [0, 1, 3, 7]
    assert status["costs"]["source"] == "none"
    assert status["needs_costs"] is True
    assert status["max_running_requests"] == plan.engine.max_running_requests


def test_a_change_of_parameters_takes_effect(client: TestClient, manager: Manager) -> None:
    before = manager.control.reporter.controller.policies
    answer = client.post("/specstack/budget", json={"kind": "fixed", "draft_budget": 3})
    assert answer.status_code == 200, answer.text
    assert answer.json()["policy"]["kind"] == "fixed"
    assert manager.control.reporter.controller.next(LOAD).draft_budget == 3
    status = client.get("/specstack/status").json()
    assert status["plan_hash"] == answer.json()["plan_hash"] != ""
    assert status["needs_costs"] is False
    answer = client.post("/specstack/budget", json={"draft_budget": 1})
    assert manager.control.reporter.controller.next(LOAD).draft_budget == 1, "merged"
    assert manager.control.reporter.controller.policies is not before


def test_a_shadow_starts_and_stops(client: TestClient, manager: Manager) -> None:
    client.post("/specstack/budget", json={"shadow": {"kind": "fixed", "draft_budget": 3}})
    controller = manager.control.reporter.controller
    controller.next(LOAD)
    assert client.get("/specstack/status").json()["shadow"]["next"]["draft_budget"] == 3
    client.post("/specstack/budget", json={"shadow": None})
    assert client.get("/specstack/status").json()["shadow"] is None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"dwell": 3}, "budget.dwell: "),
        ({"hysteresis": "much"}, "budget.hysteresis: "),
        ({"kind": "fixed", "draft_budget": 9}, "9 drafts are more than the 7"),
        ({"force": 8}, "force: expected null or one of 0, 1, 2, 3, 4, 5, 6, 7, found 8"),
        ({"force": True}, "force: expected"),
        ({"force": 3, "seconds": -1}, "seconds: expected a number above 0, found -1"),
        ({"force": 3, "kind": "fixed"}, 'expected a budget section, or {"force": n | null}'),
        ({"costs": "other.json"}, "is read when a server starts: restart it"),
        ([1], "expected a JSON object"),
    ],
)
def test_what_the_language_refuses_is_refused(
    client: TestClient, manager: Manager, body: Any, problem: str
) -> None:
    before = manager.control.reporter.controller.policies
    answer = client.post("/specstack/budget", json=body)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]
    assert manager.control.reporter.controller.policies is before, "nothing changed"


def test_a_body_that_is_no_json_is_refused(client: TestClient) -> None:
    answer = client.post("/specstack/budget", content=b"{")
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["error"]


def test_a_scheduler_that_does_not_answer_is_no_success(
    client: TestClient, manager: Manager
) -> None:
    manager.obeys = False
    answer = client.post("/specstack/budget", json={"force": 3})
    assert answer.status_code == 400
    assert "did not take the command" in answer.json()["error"]


def test_a_forced_budget_acts_until_it_is_lifted(client: TestClient, manager: Manager) -> None:
    assert client.post("/specstack/budget", json={"force": 7}).json()["forced"] == 7
    assert manager.control.reporter.controller.next(LOAD).reason == "forced"
    assert client.post("/specstack/budget", json={"force": None}).json()["forced"] is None
    assert manager.control.reporter.controller.next(LOAD).reason == "learning"


def test_a_forced_budget_ends_by_itself(
    client: TestClient, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that is killed leaves nothing behind."""
    client.post("/specstack/budget", json={"force": 7, "seconds": 30})
    controller = manager.control.reporter.controller
    assert controller.next(LOAD).reason == "forced"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31)
    assert controller.next(LOAD).reason != "forced"
    assert client.get("/specstack/status").json()["forced"] is None


@pytest.mark.parametrize(
    "command",
    [
        "x",
        "[1]",
        '{"force": 3}',
        '{"number": 1, "force": 99, "seconds": null}',
        '{"number": 1, "force": "many", "seconds": null}',
        '{"number": 1, "budget": {}}',
        '{"number": 1, "fit": {}}',
        '{"number": 1, "budget": {"budget": {"kind": "x", "implementation": "os:system",'
        ' "options": {}}, "shadow": null, "fallback": {}, "budgets": [0], "info": {}}}',
        '{"number": 1, "budget": {"budget": {"kind": "fixed", "implementation":'
        ' "specstack.budget.fixed:FixedPolicy", "options": {"draft_budget": -1}},'
        ' "shadow": null, "fallback": {}, "budgets": [0], "info": {}}}',
    ],
)
def test_what_others_write_into_the_engines_state_does_not_reach_the_scheduler(
    plan: Plan, command: str
) -> None:
    """SGLang's own route lets whoever may update its state write any key."""
    control = make_control(plan)
    before = control.reporter.controller.policies
    with pytest.raises(CommandError):
        control.check(f"specstack:{command}")
    assert control.reporter.controller.policies is before
    sound = command_key({"number": 1, "budget": budget_command(plan)})
    assert control.check(sound)["number"] == 1, "control"


def test_a_table_that_cannot_be_stored_is_used_all_the_same(
    client: TestClient, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(table: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("specstack_serving.control.save_table", full)
    for budget, step in ((0, 0.010), (3, 0.014), (7, 0.020)):
        rounds(manager.control, 12, budget, step)
    answer = client.post("/specstack/costs", json={"fit": {"command": "a test"}})
    assert answer.status_code == 200
    assert answer.json()["path"] is None
    assert "no space" in answer.json()["not_stored"]
    assert manager.control.reporter.controller.costs.ready


def test_a_table_is_fitted_used_and_stored(client: TestClient, manager: Manager) -> None:
    fit = {"fit": {"command": "a test"}}
    refused = client.post("/specstack/costs", json=fit)
    assert refused.status_code == 400
    assert refused.json()["error"], "no samples: says what is missing"
    for budget, step in ((0, 0.010), (3, 0.014), (7, 0.020)):
        rounds(manager.control, 12, budget, step)
    answer = client.post("/specstack/costs", json=fit)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["costs"]["source"] == "measured"
    assert json.loads(Path(content["path"]).read_text())["command"] == "a test"
    assert content["acceptance"]["accept_length"] is None, "the sweep's drafts are forgotten"
    costs = manager.control.reporter.controller.costs
    step_ms = costs.step_ms(2, 15.0, np.array([0, 7]), np.array([[1.0], [8.0]]))
    assert step_ms[:, 0].tolist() == pytest.approx([10, 20], rel=0.05)
    assert client.post("/specstack/costs", json={"samples": "clear"}).status_code == 200
    assert not costs.samples
    assert client.post("/specstack/costs", json={"samples": "keep"}).status_code == 400


@pytest.mark.parametrize(
    ("api_key", "admin_key", "token", "allowed"),
    [
        (None, None, None, True),
        ("api", None, None, False),
        ("api", None, "api", True),
        ("api", "admin", "api", False),
        (None, "admin", None, False),
        (None, "admin", "admin", True),
    ],
)
def test_changes_need_the_engines_admin_key(
    client: TestClient, api_key: str | None, admin_key: str | None, token: str | None, allowed: bool
) -> None:
    """By SGLang's own middleware; the status follows the API key alone."""
    auth = pytest.importorskip("sglang.srt.utils.auth")
    app = client.app
    assert isinstance(app, FastAPI)
    app.middleware_stack = None
    auth.add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_key)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for path, body in (("budget", {"force": None}), ("costs", {"samples": "clear"})):
        answer = TestClient(app).post(f"/specstack/{path}", json=body, headers=headers)
        assert answer.status_code == (200 if allowed else 401), path
    status = TestClient(app).get("/specstack/status", headers=headers)
    assert status.status_code == (200 if api_key is None or token == "api" else 401)


def test_commands_travel_in_the_keys_of_the_engines_own_updates() -> None:
    own = object()
    handlers = CommandHandlers({"pp_max_micro_batch_size": 1}, own)
    key = command_key({"number": 1, "force": 3})
    assert handlers.get(key) is own
    assert handlers[key] is own
    assert handlers.get("pp_max_micro_batch_size") == 1
    assert handlers.get("unknown") is None
    with pytest.raises(KeyError):
        handlers["unknown"]


def test_a_plan_that_decides_by_costs_is_known(plan: Plan) -> None:
    assert needs_costs(plan)
    fixed = plan.model_copy(update={"budget": plan.budget.model_copy(update={"options": {}})})
    assert not needs_costs(fixed)
    assert needs_costs(fixed.model_copy(update={"shadow": plan.budget}))
