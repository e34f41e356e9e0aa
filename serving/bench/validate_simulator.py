"""Does the simulator foretell what a server does? Predicted against measured tokens per second.

    python serving/bench/bench_budgets.py dsl/specs/quickstart.yaml --prompts FILE \
        --set metrics.trace=/tmp/trace
    python serving/bench/validate_simulator.py /tmp/trace --costs TABLE.json

The trace holds rounds of several policies at several loads. Measured are the tokens per second of
rounds over exactly so many requests, without the time of prompts. The simulator gets the cost
table, which was measured before, and what drafts were worth in the rounds that verified the largest
budget; it is told nothing about the rounds of the policies that it foretells.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from specstack.budget.base import BudgetRuntime
from specstack.budget.cost_store import read_table
from specstack.budget.costs import CostModel
from specstack.budget.oracle import OraclePolicy
from specstack.budget.survival import SurvivalWindow
from specstack.metrics.record import RoundRecord
from specstack.metrics.trace import read_trace
from specstack.simulation.policies import Candidate, parse_policies
from specstack.simulation.recorded import RecordedAcceptance
from specstack.simulation.server import Server, simulate
from specstack.simulation.workload import Workload

POLICIES = "fixed:0,fixed:3,fixed:7,fixed:15,ema,goodput"
OF_GOODPUT = {"goodput", "hold", "off", "probe", "learning"}
REQUESTS = 96
"""Simulated per load and policy."""
MIN_ROUNDS = 20


def policy_of(record: RoundRecord) -> str:
    """Which policy of the trace chose this round."""
    if record.reason == "fixed":
        return f"fixed:{record.draft_budget}"
    return "goodput" if record.reason in OF_GOODPUT else record.reason


def measured(records: Sequence[RoundRecord]) -> dict[tuple[int, str], tuple[float, int]]:
    """Tokens per second and rounds, by requests and policy."""
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for record in records:
        if record.step_seconds is not None and not any(record.ended):
            each = sums[record.num_requests, policy_of(record)]
            each[0] += record.num_emitted
            each[1] += record.step_seconds
            each[2] += 1
    return {key: (tokens / seconds, int(n)) for key, (tokens, seconds, n) in sums.items()}


class Prophet:
    """The simulator, told costs and what drafts are worth."""

    def __init__(self, costs: Path, records: Sequence[RoundRecord]) -> None:
        self.table = read_table(costs)
        self.widest = max(record.draft_budget for record in records)
        known = [r for r in records if policy_of(r) == f"fixed:{self.widest}"]
        self.acceptance = RecordedAcceptance(known, self.widest)
        lengths = [length for record in known for length in record.context_lens]
        self.context = int(np.mean(lengths))

    def tokens_per_second(self, level: int, candidate: Candidate) -> float:
        """Of rounds over `level` requests."""
        half = 32
        work = Workload(
            f"closed:{level}",
            np.full(REQUESTS, max(1, self.context - half)),
            np.full(REQUESTS, 2 * half),
            concurrency=np.full(REQUESTS, level),
        )
        truth = CostModel(self.table, ragged=True)
        oracle = OraclePolicy(self.table.draft_budgets)
        oracle.attach(BudgetRuntime(truth, SurvivalWindow(self.table.draft_budgets), ragged=True))
        server = Server(work, self.acceptance, truth, oracle, prefill_ms_per_token=1.0)
        run = simulate(server, candidate.controller(self.table, ragged=True))
        at_level = run.num_running == level
        seconds = float(run.step_ms[at_level].sum()) / 1000
        share = float(run.num_running[at_level].sum()) / float(run.num_running.sum())
        first_tokens = REQUESTS
        return (run.num_tokens - first_tokens) * share / seconds


@click.command()
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.option("--costs", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--level", "levels", multiple=True, type=int, default=(1, 2, 4, 8, 16),
              show_default=True, help="Requests in flight.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def main(trace: Path, costs: Path, levels: tuple[int, ...], form: str) -> None:
    """Compare the simulator with the rounds of TRACE."""
    records = list(read_trace(trace)[1])
    facts, prophet = measured(records), Prophet(costs, records)
    rows = []
    for level in levels:
        for candidate in parse_policies(POLICIES, prophet.table.draft_budgets):
            rate, rounds = facts.get((level, candidate.name), (0.0, 0))
            if rounds < MIN_ROUNDS:
                continue
            foretold = prophet.tokens_per_second(level, candidate)
            rows.append(
                {
                    "requests": level,
                    "policy": candidate.name,
                    "rounds": rounds,
                    "measured": round(rate, 1),
                    "predicted": round(foretold, 1),
                    "error": round(foretold / rate - 1, 3),
                }
            )
    if form == "json":
        click.echo(json.dumps(rows, indent=2))
        return
    shown = Table(*rows[0]) if rows else Table()
    for row in rows:
        shown.add_row(*map(str, row.values()))
    Console().print(shown)
    errors = [abs(row["error"]) for row in rows]
    click.echo(f"absolute error: mean {np.mean(errors):.1%}, largest {np.max(errors):.1%}")


if __name__ == "__main__":
    main()
