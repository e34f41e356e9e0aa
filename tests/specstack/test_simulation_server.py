"""The simulated server keeps its books, policies see the same drafts, and good ones do well."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from specstack.budget.base import BudgetRuntime
from specstack.budget.cost_store import save_table
from specstack.budget.costs import CostKey, CostModel, CostTable
from specstack.budget.oracle import OraclePolicy
from specstack.budget.survival import SurvivalWindow
from specstack.cli import cli
from specstack.metrics.trace import TraceWriter
from specstack.simulation import server as server_module
from specstack.simulation.acceptance import AcceptCurve, SyntheticAcceptance
from specstack.simulation.errors import SimulationError
from specstack.simulation.job import Options, run_job
from specstack.simulation.loads import LoadOptions
from specstack.simulation.plots import plot
from specstack.simulation.policies import parse_policies
from specstack.simulation.server import Server, simulate
from specstack.simulation.workload import Workload

CHOICES = (0, 1, 3, 7)
CURVE = AcceptCurve(((1, 1.6), (3, 2.2), (7, 2.7)))


def a_table(slope=1.0):
    """5 ms and `slope` ms per token of a step, and 1 ms for drafting."""
    batches = (1, 4, 16)
    tokens = np.outer(batches, [1 + choice for choice in CHOICES])
    return CostTable.fitted(
        key=CostKey(device="d", model="m", drafter="h", engine="e", dtype="f"),
        num_requests=batches,
        draft_budgets=CHOICES,
        contexts=(64,),
        verify_ms=(5 + slope * tokens)[:, :, None].astype(float),
        draft_ms=np.repeat([[0.0, 1.0, 1.0, 1.0]], 3, axis=0),
        num_rounds=1,
        command="test",
    )


def a_server(workload, ragged=True, table=None, **changes):
    costs = CostModel(table or a_table(), ragged=ragged)
    oracle = OraclePolicy(CHOICES)
    oracle.attach(BudgetRuntime(costs, SurvivalWindow(CHOICES), ragged))
    acceptance = SyntheticAcceptance(CURVE, CHOICES[-1], workload.output_lens, seed=0)
    return Server(workload, acceptance, costs, oracle, prefill_ms_per_token=0.5, **changes)


def closed(level, count=40, output=30):
    lens = np.full(count, output)
    return Workload("closed", np.full(count, 10), lens, concurrency=np.full(count, level))


def run(server, policy):
    (candidate,) = parse_policies(policy, CHOICES)
    return simulate(server, candidate.controller(server.costs.table, ragged=server.costs.ragged))


def test_one_plain_request_takes_its_prompt_and_a_round_per_token():
    work = Workload("one", np.array([10]), np.array([30]), arrivals=np.array([1.0]))
    done = run(a_server(work), "plain")
    assert done.ttft_ms.tolist() == pytest.approx([10 * 0.5])
    assert done.tpot_ms.tolist() == pytest.approx([6.0])
    assert done.total_ms == pytest.approx(1000 + 5 + 29 * 6)
    assert done.num_tokens == 30
    assert done.num_running.tolist() == [1] * 29


def test_every_token_is_counted_once_under_any_policy():
    work = Workload("open", np.full(20, 10), np.arange(1, 21), arrivals=np.arange(20) * 0.03)
    server = a_server(work)
    for policy in ("plain", "fixed:7", "goodput", "oracle"):
        done = run(server, policy)
        assert done.num_tokens == work.output_lens.sum()
        assert np.isfinite(done.ttft_ms).all()
        assert (np.isfinite(done.tpot_ms) == (work.output_lens > 1)).all()


def test_a_closed_load_stays_at_its_level_and_a_full_server_queues():
    assert set(run(a_server(closed(4)), "fixed:3").num_running.tolist()) == {4}
    assert run(a_server(closed(4), max_running=2), "fixed:3").num_running.max() == 2
    together = Workload("open", np.full(8, 10), np.full(8, 30), arrivals=np.zeros(8))
    few = run(a_server(together, max_running=2), "plain")
    assert few.ttft_ms.max() > 5 * run(a_server(together), "plain").ttft_ms.max()


def test_steps_change_the_load():
    levels = np.array([1] * 3 + [8] * 24 + [1] * 3)
    work = Workload("steps", np.full(30, 10), np.full(30, 40), concurrency=levels)
    running = run(a_server(work), "plain").num_running
    assert (running[0], running.max(), running[-1]) == (1, 8, 1)


def test_arrivals_that_are_no_whole_number_of_milliseconds_are_served():
    arrivals = np.cumsum(np.random.default_rng(0).random(300))
    work = Workload("open", np.full(300, 1), np.full(300, 2), arrivals=arrivals)
    assert run(a_server(work), "plain").num_tokens == 600


def test_the_price_saves_time_where_batches_are_ragged_and_none_where_they_are_padded():
    dear, free = "fixed:draft_budget=7:min_survival=0.3", "fixed:7"
    for ragged in (True, False):
        server = a_server(closed(4), ragged)
        with_price, without = run(server, dear), run(server, free)
        assert with_price.num_drafts < without.num_drafts
        assert (with_price.step_ms.mean() < without.step_ms.mean()) == ragged


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("level", [1, 4, 16])
def test_nothing_beats_the_oracle_and_goodput_comes_near(level, ragged):
    server = a_server(closed(level, count=3 * level + 4, output=60), ragged)
    assert run(server, "oracle").regret == pytest.approx(0, abs=1e-9)
    names = ("plain", "fixed:1", "fixed:3", "fixed:7")
    regrets = sorted(run(server, name).regret for name in names)
    goodput = run(server, "goodput").regret
    assert regrets[0] >= 0
    assert goodput >= 0
    # The oracle also knows which round is a good one, which nobody can: the best fixed budget is
    # behind it as well.
    assert goodput < regrets[0] + 0.04
    assert goodput < regrets[2]


def test_a_policy_that_believes_wrong_costs_does_worse_until_it_learns():
    server = a_server(closed(16, count=100, output=50), ragged=False, table=a_table(slope=0.01))
    (candidate,) = parse_policies("goodput", CHOICES)
    right, wrong = (
        simulate(server, candidate.controller(table, ragged=False))
        for table in (a_table(slope=0.01), a_table(slope=3.0))
    )
    assert wrong.regret > right.regret + 0.02


def test_policies_hear_of_a_round_one_round_later(monkeypatch):
    calls = []

    class Told:
        def next(self, load):
            calls.append(("next", load.num_running))
            return server_module.Budget(3, "fixed")

        def observe(self, record):
            calls.append(("observe", record.num_requests))

    simulate(a_server(closed(2, count=2, output=10)), Told())
    assert [name for name, _ in calls[:4]] == ["next", "next", "observe", "next"]


def test_a_prompt_between_two_rounds_leaves_the_step_untimed():
    records = []

    class Told:
        def next(self, load):
            return server_module.Budget(3, "fixed")

        def observe(self, record):
            records.append(record)

    simulate(a_server(closed(2, count=12, output=10)), Told())
    untimed = [record for record in records if record.step_seconds is None]
    assert 0 < len(untimed) < len(records)
    for record in records:
        assert record.survivals.shape == (2, 3)
        assert (np.diff(record.accept_ranks, axis=1)[record.accept_ranks[:, 1:] > 0] > 0).all()
        assert record.num_correct == tuple((record.accept_ranks > 0).sum(axis=1).tolist())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--policies: expected a list, for example plain,fixed:3,oracle"),
        ("plain,plain", "--policies: plain is there twice"),
        ("godput", "no policy 'godput'"),
        ("fixed:draft_budget", "--policies fixed:draft_budget: draft_budget: "),
        ("goodput:dwell=3", "--policies goodput:dwell=3: dwell: Extra inputs are not permitted"),
        ("goodput:3", "--policies goodput:3: expected OPTION=VALUE, found '3'"),
        ("table:8=3:4=1", "max_batch must rise from row to row"),
        ("none.yaml", "none.yaml"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(text, message):
    with pytest.raises(SimulationError) as error:
        parse_policies(text, CHOICES)
    assert message in str(error.value)


def test_the_budget_of_a_pipeline_file_is_a_policy(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("version: 1\ntarget: some/model\nbudget: {kind: fixed, draft_budget: 3}\n")
    (candidate,) = parse_policies(str(file), CHOICES)
    assert (candidate.name, candidate.budgets) == ("mine", (0, 3))


def simulated(*arguments):
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


def test_the_command_compares_policies_and_writes_a_folder(tmp_path):
    names = "plain,fixed:32,goodput,oracle"
    result = simulated("--load", "steps:1,4", "--max-requests", 10, "--output-tokens", 60,
                       "--policies", names, "-o", tmp_path / "out", "--format", "json")  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert json.loads((tmp_path / "out/results.json").read_text()) == data
    policies = data["policies"]
    assert list(policies) == ["plain", "fixed:32", "goodput", "oracle"]
    assert policies["plain"]["speedup"] == 1.0
    assert policies["plain"]["share_off"] == pytest.approx(1.0)
    assert policies["fixed:32"]["speedup"] > 1.5
    assert policies["oracle"]["behind_oracle"] == 0.0
    assert {file.name for file in (tmp_path / "out").glob("*.png")} == {
        "budgets.png", "tokens_per_s.png", "regret.png",
    }  # fmt: skip


def test_the_table_has_a_row_per_policy():
    result = simulated("--load", "closed:2", "--max-requests", 6, "--policies", "plain,fixed:16")
    assert result.exit_code == 0, result.output
    for text in ("closed:2, 6 requests", "tokens/s", "regret %", "fixed:16"):
        assert text in result.stdout


def test_what_was_recorded_can_be_replayed(tmp_path):
    costs = save_table(a_table(), tmp_path / "costs.json")
    work = Workload("open", np.full(30, 10), np.full(30, 40), arrivals=np.arange(30) * 0.05)
    with TraceWriter(tmp_path / "trace", {"plan": "x"}) as writer:
        (candidate,) = parse_policies("fixed:3", CHOICES)
        server = a_server(work)
        controller = candidate.controller(server.costs.table, ragged=True)
        observe = controller.observe
        controller.observe = lambda record: (writer.write(record), observe(record))
        told = simulate(server, controller)
    result = simulated(tmp_path / "trace", "--costs", costs, "--prefill-ms-per-token", 0.5,
                       "--policies", "fixed:3,goodput,oracle", "--format", "json")  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["settings"]["load"] == "as recorded"
    assert data["settings"]["num_requests"] == 30
    replayed = data["policies"]["fixed:3"]
    assert replayed["accept_length"] == pytest.approx(told.measures()["accept_length"], rel=0.05)
    assert replayed["mean_tpot_ms"] == pytest.approx(told.mean_tpot_ms, rel=0.1)
    assert data["policies"]["goodput"]["regret"] < 0.06


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --load, for example closed:16, or a TRACE to take it from"),
        (
            ["--load", "closed:1", "--costs", "none.json"],
            "none.json: no such file; expected a cost",
        ),
        (["--load", "closed:1", "--choices", "3,1"], "expected budgets rising from 0"),
        (["--load", "closed:1", "--scale-lengths", "x"], "expected a number above 0, for example"),
        (["--load", "closed:1", "--acceptance", "3"], "expected BUDGET=ACCEPT_LENGTH,..."),
    ],
)
def test_bad_input_ends_with_2_and_a_sentence(arguments, message):
    result = simulated(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("\n│ ", " ").split())


def test_a_cost_file_alone_does_not_say_what_drafts_are_worth(tmp_path):
    costs = save_table(a_table(), tmp_path / "costs.json")
    result = simulated("--load", "closed:1", "--costs", costs)
    assert result.exit_code == 2
    assert "what are drafts worth? Give a TRACE, or --acceptance" in result.output


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(tmp_path):
    def numbers(seed):
        options = Options(
            policies="goodput", costs="qwen3-8b-h100", trace=None, load="closed:4",
            acceptance=None, believed_costs=None, choices=None, padded=False, optimism=1.0,
            max_running=64, prefill_ms_per_token=None,
            load_options=LoadOptions(max_requests=12, seed=seed),
        )  # fmt: skip
        report = run_job(options, lambda name, total: lambda done: None)
        assert len(plot(report, tmp_path)) == 3
        return report.as_data()["policies"]

    assert numbers(0) == numbers(0)
    assert numbers(0) != numbers(1)
