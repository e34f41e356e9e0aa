"""One comparison: options in, a report of all policies out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specstack.budget.base import BudgetRuntime
from specstack.budget.cost_store import read_table
from specstack.budget.costs import CostModel, CostTable
from specstack.budget.oracle import OraclePolicy
from specstack.budget.survival import SurvivalWindow
from specstack.metrics.record import RoundRecord
from specstack.metrics.trace import read_trace
from specstack.simulation.acceptance import Acceptance, AcceptCurve, SyntheticAcceptance
from specstack.simulation.errors import SimulationError
from specstack.simulation.loads import LoadOptions, parse_load
from specstack.simulation.policies import ORACLE, PLAIN, Candidate, parse_policies
from specstack.simulation.profiles import PROFILES
from specstack.simulation.recorded import RecordedAcceptance
from specstack.simulation.replay import recorded_load
from specstack.simulation.run import Run
from specstack.simulation.server import Server, simulate
from specstack.simulation.workload import Workload

Bar = Callable[[str, int], Callable[[int], None]]
"""(name, requests) -> what is to be told how many finished."""


@dataclass(frozen=True)
class Options:
    """What a simulation is asked for; None: derived."""

    policies: str
    costs: str
    """Name of a profile, or a cost table's file."""
    trace: Path | None
    load: str | None
    acceptance: str | None
    believed_costs: str | None
    choices: tuple[int, ...] | None
    padded: bool
    optimism: float
    max_running: int
    prefill_ms_per_token: float | None
    load_options: LoadOptions


@dataclass(frozen=True)
class Costs:
    """Times, and what comes with a profile."""

    table: CostTable
    ragged: bool
    curve: AcceptCurve | None = None


@dataclass(frozen=True)
class Report:
    """Runs by policy, and what they were made with."""

    settings: dict[str, Any]
    runs: dict[str, Run]

    def as_data(self) -> dict[str, Any]:
        """JSON."""
        return {"settings": self.settings, "policies": {n: self.measures(n) for n in self.runs}}

    def measures(self, name: str) -> dict[str, float | None]:
        """Of one policy; with those that need another one: None where that was not simulated."""
        run, plain, oracle = self.runs[name], self.runs.get(PLAIN), self.runs.get(ORACLE)
        return {
            **run.measures(),
            "speedup": None if plain is None else plain.mean_tpot_ms / run.mean_tpot_ms,
            "behind_oracle": None
            if oracle is None
            else 1.0 - run.tokens_per_s / oracle.tokens_per_s,
        }


def run_job(options: Options, bar: Bar) -> Report:
    """Simulate every policy on the same arrivals and drafts.

    Raises:
        SimulationError, TraceError, CostTableError: the input is wrong; says where.
    """
    costs = _costs(options.costs, options.padded)
    choices = options.choices or costs.table.draft_budgets
    candidates = parse_policies(options.policies, choices)
    records = list(read_trace(options.trace)[1]) if options.trace else []
    workload = _workload(options, records)
    budgets = tuple(sorted({0, *choices, *(b for one in candidates for b in one.budgets)}))
    acceptance = _acceptance(options, costs, records, workload, budgets[-1])
    truth = CostModel(costs.table, ragged=costs.ragged)
    oracle = OraclePolicy(budgets)
    oracle.attach(BudgetRuntime(truth, SurvivalWindow(budgets), costs.ragged))
    prefill = options.prefill_ms_per_token or _prefill_ms_per_token(costs.table)
    server = Server(workload, acceptance, truth, oracle, prefill, options.max_running)
    believed = costs
    if options.believed_costs:
        believed = _costs(options.believed_costs, options.padded)
    runs = {
        one.name: _simulate(server, one, believed.table, bar(one.name, len(workload)))
        for one in candidates
    }
    settings = {
        "load": workload.name,
        "num_requests": len(workload),
        "costs": options.costs,
        "cost_key": costs.table.key.digest,
        "believed_costs": options.believed_costs or options.costs,
        "acceptance": acceptance.name,
        "optimism": options.optimism,
        "ragged": costs.ragged,
        "choices": list(choices),
        "prefill_ms_per_token": prefill,
        "max_running": options.max_running,
        "seed": options.load_options.seed,
    }
    return Report(settings, runs)


def _simulate(
    server: Server, candidate: Candidate, table: CostTable, progress: Callable[[int], None]
) -> Run:
    return simulate(server, candidate.controller(table, ragged=server.costs.ragged), progress)


def _costs(text: str, padded: bool) -> Costs:
    if text in PROFILES:
        profile = PROFILES[text]()
        return Costs(profile.costs, profile.ragged, profile.curve)
    if not Path(text).is_file():
        known = ", ".join(PROFILES)
        raise SimulationError(
            f"{text}: no such file; expected a cost table, or one of these profiles: {known}"
        )
    table = read_table(text)
    return Costs(table, ragged=not padded)


def _prefill_ms_per_token(table: CostTable) -> float:
    """What a token of the table's largest cell costs: the cheapest that was measured."""
    tokens = table.num_requests[-1] * (1 + table.draft_budgets[-1])
    return table.verify_ms[-1][-1][0] / tokens


def _workload(options: Options, records: list[RoundRecord]) -> Workload:
    if options.load is not None:
        return parse_load(options.load, options.load_options)
    if not options.trace:
        raise SimulationError("give --load, for example closed:16, or a TRACE to take it from")
    return recorded_load(records)


def _acceptance(
    options: Options, costs: Costs, records: list[RoundRecord], workload: Workload, width: int
) -> Acceptance:
    seed = options.load_options.seed
    if options.acceptance is None and options.trace:
        return RecordedAcceptance(records, width, seed)
    curve = costs.curve if options.acceptance is None else _curve(options.acceptance)
    if curve is None:
        raise SimulationError(
            "what are drafts worth? Give a TRACE, or --acceptance, for example 1=1.6,3=2.2,7=2.7"
        )
    return SyntheticAcceptance(curve, width, workload.output_lens, seed, options.optimism)


def _curve(text: str) -> AcceptCurve:
    try:
        pairs = [point.split("=") for point in text.split(",")]
        return AcceptCurve(tuple((int(budget), float(length)) for budget, length in pairs))
    except ValueError as error:
        raise SimulationError(
            f"--acceptance {text}: expected BUDGET=ACCEPT_LENGTH,..., for example 1=1.6,3=2.2"
        ) from error
