"""The sweep makes rounds of every cell happen, and leaves the server as it was."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specstack.budget.cost_store import read_table, save_table
from specstack.budget.costs import CostKey, CostModel, CostTableError
from specstack.cli import main
from specstack.metrics.record import RoundRecord
from specstack_serving import bench_cli, cost_sweep
from specstack_serving.cost_sweep import (
    ANSWER,
    LONG,
    SHORT,
    Group,
    SweepError,
    plan_sweep,
    server_status,
    sweep,
)
from specstack_serving.sweep_prompts import sweep_prompt

QUICKSTART = str(Path(__file__).parents[2] / "dsl" / "specs" / "quickstart.yaml")
PLAIN = ("--set", "drafter=none", "--set", "budget={kind: fixed, draft_budget: 0}")
GROUPS = (Group(1, 100, (0, 1, 3), 6), Group(4, 100, (0, 1, 3), 6), Group(1, 1500, (0, 1, 3), 6))


KEY = CostKey(device="fake", model="m", drafter="ngram", engine="none", dtype="float32")
BETWEEN_ROUNDS = 0.002
LEFT_AS_IT_WAS = [("budget", {"force": None}), ("costs", {"samples": "clear"})]
"""How a sweep that fails ends: made up prompts have taught nobody anything."""


def step_ms(requests: int, budget: int, context: float) -> float:
    """What a full round takes on the machine that is made up."""
    return 10.0 + (2.0 if budget else 0.0) + requests * (1 + budget) + 0.001 * requests * context


class FakeEngine:
    """A server that runs rounds without a model: in a thread, some milliseconds apart, over the
    requests whose streams are open, each recorded with the time of a made-up machine. Its
    attributes may be changed while it runs."""

    def __init__(self, folder: Path, *, max_running: int = 8, admin_key: str | None = None) -> None:
        self.folder, self.max_running, self.admin_key = folder, max_running, admin_key
        self.costs = CostModel(None)
        self.rounds = 0
        self.forced: int | None = None
        self.commands: list[tuple[str, Any]] = []
        self.prompts: dict[int, int] = {}
        """Words of the prompts of open streams."""
        self.load: dict[str, int] | None = None
        self.stalled = False
        self.refuse_prompts = ""
        self.step_ms = step_ms
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run_rounds(self) -> None:
        while not self._stop.wait(BETWEEN_ROUNDS):
            with self._lock:
                contexts = tuple(self.prompts.values())
                if contexts and not self.stalled:
                    self._round(contexts)

    def stop(self) -> None:
        self._stop.set()

    def _round(self, contexts: tuple[int, ...]) -> None:
        requests, budget = len(contexts), self.forced or 0
        self.rounds += 1
        self.load = {"num_running": requests, "num_queued": 0}
        seconds = self.step_ms(requests, budget, sum(contexts) / requests) / 1000
        self.costs.observe(
            RoundRecord(
                num_requests=requests, num_opted_out=0, num_drafting=requests, draft_budget=budget,
                reason="forced", num_draft_tokens=1 + budget, nodes_per_depth=(),
                draft_seconds=0.001, build_seconds=0.0, verify_seconds=0.0, accept_seconds=0.0,
                num_drafts=(budget,) * requests, context_lens=contexts, step_seconds=seconds,
            )
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        return {
            "plan_hash": "0", "load": self.load, "rounds": self.rounds, "choices": [0, 1, 3],
            "max_running_requests": self.max_running, "costs": dict(self.costs.state),
        }  # fmt: skip

    def obey(self, what: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.commands.append((what, body))
            if "force" in body:
                self.forced = body["force"]
            if body.get("samples") == "clear":
                self.costs.clear_samples()
            answer = self.status()
            if "fit" in body:
                try:
                    table = self.costs.fit(KEY, body["fit"]["command"])
                except CostTableError as error:
                    return 400, {"error": str(error)}
                answer["path"] = str(save_table(table, self.folder / "table.json"))
        return 200, answer


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(*((200, engine.status()) if self._may() else (401, {"error": "no"})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/generate":
                self._generate(body)
            elif self._may():
                self._reply(*engine.obey(self.path.removeprefix("/specstack/"), body))
            else:
                self._reply(401, {"error": "no"})

        def _may(self) -> bool:
            given = self.headers.get("Authorization")
            return engine.admin_key is None or given == f"Bearer {engine.admin_key}"

        def _generate(self, body: dict[str, Any]) -> None:
            if engine.refuse_prompts:
                self._reply(400, {"error": engine.refuse_prompts})
                return
            assert body["stream"]
            assert body["sampling_params"]["ignore_eos"]
            self.send_response(200)
            self.end_headers()
            with engine._lock:
                engine.prompts[id(self)] = len(body["text"].split())
            try:
                while not engine._stop.wait(0.01):
                    self.wfile.write(b'data: {"text": "x"}\n\n')
            except OSError:
                pass  # the client hung up: that aborts a request
            finally:
                with engine._lock:
                    del engine.prompts[id(self)]

        def _reply(self, code: int, content: dict[str, Any]) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    return Handler


@contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """Run it for the length of a block; yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(engine))
    server.daemon_threads = True
    threads = [
        threading.Thread(target=target, daemon=True)
        for target in (server.serve_forever, engine.run_rounds)
    ]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        engine.stop()
        server.shutdown()
        server.server_close()


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(tmp_path)


def run(engine: FakeEngine, groups: Any = GROUPS, **options: Any) -> dict[str, Any]:
    with serving(engine) as url:
        return asyncio.run(sweep(url, groups, command="test", **options))


class TestCells:
    def test_batch_sizes_are_powers_of_two_and_the_largest(self) -> None:
        groups = plan_sweep([3, 1], max_requests=12, context_length=8192)
        assert [g.num_requests for g in groups if g.prompt_tokens == SHORT] == [1, 2, 4, 8, 12]
        assert [g.num_requests for g in groups if g.prompt_tokens == LONG] == [1, 4]
        assert {g.budgets for g in groups} == {(0, 1, 3)}

    def test_a_coarse_sweep_takes_three_batch_sizes_and_one_long_context(self) -> None:
        groups = plan_sweep([1], max_requests=16, context_length=4096, coarse=True)
        found = [(g.num_requests, g.prompt_tokens) for g in groups]
        assert found == [(1, SHORT), (4, SHORT), (16, SHORT), (1, LONG // 2)]

    @pytest.mark.parametrize("context_length", [512, 700, 1100, 4096])
    def test_prompts_and_answers_stay_within_the_context(self, context_length: int) -> None:
        groups = plan_sweep([1], max_requests=2, context_length=context_length)
        assert all(g.prompt_tokens + ANSWER < context_length for g in groups)

    def test_groups_that_the_cache_cannot_hold_are_left_out(self) -> None:
        groups = plan_sweep([1], max_requests=8, context_length=8192, max_total_tokens=2500)
        assert [(g.num_requests, g.prompt_tokens) for g in groups] == [
            (1, SHORT), (2, SHORT), (4, SHORT), (1, LONG),
        ]  # fmt: skip

    def test_prompts_differ_and_have_the_length(self) -> None:
        assert sweep_prompt(1, 500) == sweep_prompt(1, 500) != sweep_prompt(2, 500)
        assert 380 <= len(sweep_prompt(1, 500).split()) <= 440


class TestSweep:
    def test_the_machine_that_was_made_up_is_found(self, engine: FakeEngine) -> None:
        told: list[tuple[int, int]] = []
        answer = run(engine, say=lambda text, done, total: told.append((done, total)))
        table = read_table(Path(answer["path"]), KEY)
        assert (table.num_requests, table.draft_budgets) == ((1, 4), (0, 1, 3))
        assert len(table.contexts) == 2
        times = np.array(table.verify_ms) + np.array(table.draft_ms)[:, :, None]
        wanted = [
            [[step_ms(r, w, c) for c in table.contexts] for w in table.draft_budgets]
            for r in table.num_requests
        ]
        np.testing.assert_allclose(times, wanted, rtol=0.03)
        assert told[-1] == (9, 9)
        assert table.command == "test"

    def test_old_samples_are_cleared_and_the_policy_decides_again(self, engine: FakeEngine) -> None:
        run(engine, GROUPS[:1])
        assert engine.commands[0] == ("costs", {"samples": "clear"})
        assert engine.commands[-1] == ("budget", {"force": None})
        forced = [body["force"] for what, body in engine.commands if what == "budget"]
        assert forced == [0, 0, 1, 3, None]

    def test_every_cell_has_its_rounds(self, engine: FakeEngine) -> None:
        run(engine, GROUPS[:2])
        cells = [(s.num_requests, s.draft_budget) for s in engine.costs.samples]
        for requests in (1, 4):
            for budget in (0, 1, 3):
                assert cells.count((requests, budget)) >= 6

    @pytest.mark.parametrize(("given", "works"), [("secret", True), ("wrong", False)])
    def test_the_admin_key_is_shown(self, engine: FakeEngine, given: str, works: bool) -> None:
        engine.admin_key = "secret"
        if works:
            run(engine, GROUPS[:1], api_key=given, admin_key=given)
            return
        with pytest.raises(SweepError, match=r"/specstack/status: 401: give the server's key"):
            run(engine, GROUPS[:1], api_key=given, admin_key=given)

    def test_a_refused_prompt_ends_the_sweep(self, engine: FakeEngine) -> None:
        engine.refuse_prompts = "too long"
        with pytest.raises(SweepError, match=r"POST /generate: 400: .*too long"):
            run(engine)
        assert engine.commands[-2:] == LEFT_AS_IT_WAS

    def test_a_table_that_cannot_be_fitted_is_explained(self, engine: FakeEngine) -> None:
        engine.step_ms = lambda requests, budget, context: 10.0
        with pytest.raises(SweepError, match=r"POST /specstack/costs: 400: verify_ms is flat"):
            run(engine, GROUPS[:1])
        assert engine.commands[-2:] == LEFT_AS_IT_WAS

    def test_a_server_that_stalls_is_given_up(self, engine: FakeEngine, monkeypatch: Any) -> None:
        monkeypatch.setattr(cost_sweep, "STALL_SECONDS", 1.0)

        def say(text: str, done: int, total: int) -> None:
            engine.stalled = True

        with pytest.raises(SweepError, match="no round in 1 s: see the server's log"):
            run(engine, GROUPS[:1], say=say)

    def test_other_requests_on_the_server_are_noticed(
        self, engine: FakeEngine, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(cost_sweep, "STALL_SECONDS", 1.0)
        engine.prompts[0] = 100
        with pytest.raises(SweepError, match="other requests run on the server"):
            run(engine)

    def test_an_interrupted_sweep_frees_the_budget_and_the_requests(
        self, engine: FakeEngine
    ) -> None:
        async def interrupted(url: str) -> None:
            task = asyncio.create_task(sweep(url, GROUPS, command="test"))
            while engine.forced != 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.2)

        with serving(engine) as url:
            asyncio.run(interrupted(url))
            assert engine.forced is None
            assert engine.prompts == {}


def test_a_server_that_is_not_specstack_is_named(engine: FakeEngine) -> None:
    engine.status = lambda: ["something else"]  # type: ignore[assignment, return-value]
    with serving(engine) as url, pytest.raises(SweepError, match="GET /specstack/status: 200: "):
        server_status(url)


class TestCommand:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_cli, "groups_of", lambda plan, status, **options: GROUPS[:1])

    def call(self, engine: FakeEngine, *words: str) -> int:
        with serving(engine) as url:
            return main(["bench", "cost", QUICKSTART, "--url", url, *words])

    def test_it_prints_where_a_budget_pays(self, engine: FakeEngine, capsys: Any) -> None:
        assert self.call(engine) == 0
        out = capsys.readouterr().out
        assert "budget 0" in out
        ratio = step_ms(1, 3, 80) / step_ms(1, 0, 80)
        assert f"{ratio:.2f}x" in out
        assert out.splitlines()[-1] == str(engine.folder / "table.json")

    def test_json_holds_the_table(self, engine: FakeEngine, capsys: Any) -> None:
        copy = engine.folder / "copy.json"
        assert self.call(engine, "--format", "json", "-o", str(copy)) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["table"] == json.loads(copy.read_text())
        assert data["rounds"][0]["break_even"][0] == 1.0
        words = data["table"]["command"].split()
        assert words[:4] == ["specstack", "bench", "cost", QUICKSTART]

    def test_a_table_on_another_machine_is_said_to_be_there(
        self, engine: FakeEngine, capsys: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(Path, "exists", lambda self: False)
        assert self.call(engine) == 0
        assert "stored on the server's machine" in capsys.readouterr().err
        engine.commands.clear()
        assert self.call(FakeEngine(engine.folder), "-o", "copy.json") == 1
        assert "copy.json is not written" in capsys.readouterr().err

    def test_the_server_that_it_starts_is_ended(
        self, engine: FakeEngine, monkeypatch: Any, capsys: Any
    ) -> None:
        events: list[str] = []

        @contextmanager
        def running_server(plan: Any, log: Path) -> Iterator[str]:
            try:
                with serving(engine) as url:
                    yield url
            finally:
                events.append("ended")

        monkeypatch.setattr(bench_cli, "running_server", running_server)
        monkeypatch.setattr(bench_cli, "prepare", bench_cli.plan_file)
        assert main(["bench", "cost", QUICKSTART]) == 0
        engine = FakeEngine(engine.folder)
        engine.refuse_prompts = "no"
        assert main(["bench", "cost", QUICKSTART]) == 1
        assert events == ["ended", "ended"]

    @pytest.mark.parametrize(
        ("words", "code", "message"),
        [
            ([*PLAIN], 1, "drafts nothing: there is nothing to choose"),
            (["--max-requests", "99"], 1, "--max-requests 99: the server runs 8 at a time"),
            (["--set", "drafter=nothing"], 2, "drafter"),
        ],
    )
    def test_mistakes_are_refused(
        self, engine: FakeEngine, capsys: Any, words: list[str], code: int, message: str
    ) -> None:
        assert self.call(engine, *words) == code
        assert message in capsys.readouterr().err

    def test_a_server_that_is_not_there_is_named(self, capsys: Any) -> None:
        assert main(["bench", "cost", QUICKSTART, "--url", "http://127.0.0.1:9"]) == 1
        assert "the server cannot be reached" in capsys.readouterr().err
