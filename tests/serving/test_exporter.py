"""Counters of the rounds, in a process that writes for several as SGLang's scheduler does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specstack.metrics.definitions import CONTEXT_BUCKETS, CONTEXT_EDGES, METRICS, context_bucket
from specstack.plan import MetricsPlan
from specstack_serving.exporter import RoundExporter

SETUP = """
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from specstack.budget.base import Budget, Load
from specstack.budget.controller import BudgetController, Decision, Policies, Report
from specstack.budget.costs import CostModel
from specstack.budget.fixed import FixedPolicy
from specstack.metrics.record import RoundRecord
from specstack.plan import MetricsPlan
from specstack_serving.exporter import RoundExporter

controller = BudgetController(Policies(FixedPolicy(4), (0, 4)), CostModel(None), ragged=True)

def record(nodes=(), correct=(0, 0), drafts=None, opted_out=0, reason="fixed", budget=4, **more):
    times = {f"{p}_seconds": more.pop(p, 0.001) for p in ("draft", "build", "verify", "accept")}
    drafts = drafts or (sum(nodes), *(0 for _ in correct[1:]))
    return RoundRecord(
        num_requests=len(correct), num_opted_out=opted_out, num_correct=correct,
        num_drafting=sum(d > 0 for d in drafts), num_drafts=drafts, draft_budget=budget,
        reason=reason, num_draft_tokens=5, nodes_per_depth=nodes,
        context_lens=more.pop("contexts", tuple(10 for _ in correct)), **times, **more)

def exporter(per_position=True, prefix="specstack", drafters=()):
    plan = MetricsPlan(prefix=prefix, per_position=per_position)
    return RoundExporter(plan, "m", enabled=True, drafters=drafters)

def report(record, watched=None, switch=False, fallbacks=0, **sides):
    load = Load(record.num_requests)
    budget = Budget(record.draft_budget, record.reason)
    return Report(record, Decision(load, budget, watched), switch, fallbacks, sides)

def count(e, *args, eager=False, **kwargs):
    e.round(report(*args, **kwargs), controller, is_eager_fallback=eager)

def scrape():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def scraped(tmp_path: Path, script: str, processes: int = 1) -> dict[str, float]:
    """Run `script` in its own processes, then read what a scrape of them all returns."""
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for text in [script] * processes + ["scrape()"]:
        command = [sys.executable, "-c", SETUP + text]
        output = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    samples = re.findall(r"^([^#\s]+) (\S+)$", output.stdout, re.MULTILINE)
    return {
        re.sub(
            r"\{model_name=\"m\"\}|model_name=\"m\",|,(pid|model_name)=\"\w+\"", "", name
        ): float(value)
        for name, value in samples
    }


MIXED = """
e = exporter()
count(e, record((4, 2, 2), (3, 1), (5, 3), opted_out=1, verify=0.5))
count(e, record(reason="batch>16", budget=0), switch=True)
count(e, record((1,), (0, 1), (0, 1)), switch=True)
"""


def test_counters_of_rounds_sum(tmp_path: Path) -> None:
    got = scraped(tmp_path, MIXED)
    assert got['specstack_rounds_total{draft_budget="4",reason="fixed"}'] == 2
    assert got['specstack_rounds_total{draft_budget="0",reason="batch>16"}'] == 1
    assert got["specstack_emitted_tokens_total"] == 6 + 2 + 3
    assert got["specstack_opted_out_requests_total"] == 1
    assert got["specstack_spec_decode_num_drafts_total"] == 2 + 1
    assert got["specstack_spec_decode_num_draft_tokens_total"] == 8 + 1
    assert got["specstack_spec_decode_num_accepted_tokens_total"] == 4 + 1
    assert got["specstack_wasted_drafts_total"] == 4
    assert got["specstack_budget_switches_total"] == 2
    assert got["specstack_verify_seconds_count"] == 3
    assert got["specstack_off_seconds_total"] == pytest.approx(0.004), "of the plain round"


def test_counts_per_position_add_up_and_never_exceed_what_was_proposed(tmp_path: Path) -> None:
    got = scraped(tmp_path, MIXED)
    proposed = "specstack_spec_decode_num_draft_tokens_per_pos_total"
    correct = "specstack_spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [
        [got.get(f'{name}{{position="{p}"}}', 0.0) for p in range(4)]
        for name in (proposed, correct)
    ]
    assert by_position == [[5, 2, 2, 0], [3, 1, 1, 0]]
    assert all(c <= p for p, c in zip(*by_position, strict=True))
    assert sum(by_position[0]) == got["specstack_spec_decode_num_draft_tokens_total"]
    assert sum(by_position[1]) == got["specstack_spec_decode_num_accepted_tokens_total"]


def test_counts_per_context_length_add_up(tmp_path: Path) -> None:
    script = """
e = exporter()
count(e, record((3, 1), (1, 0, 2), (2, 0, 2), contexts=(256, 5000, 257)))
count(e, record((1,), (0, 1, 0), (0, 1, 0), contexts=(257, 99999, 3)))
"""
    got = scraped(tmp_path, script)

    def of(name: str) -> dict[str, float]:
        pattern = rf'specstack_{name}_per_context_total{{context="(.*)"}}'
        return {m[1]: value for key, value in got.items() if (m := re.fullmatch(pattern, key))}

    drafts, correct = of("spec_decode_num_draft_tokens"), of("spec_decode_num_accepted_tokens")
    assert drafts == {"<=256": 2, "<=1024": 2, ">65536": 1}
    assert correct == {"<=256": 1, "<=1024": 2, ">65536": 1}
    assert of("spec_decode_num_drafts") == {"<=256": 1, "<=1024": 1, ">65536": 1}
    assert sum(drafts.values()) == got["specstack_spec_decode_num_draft_tokens_total"]
    assert sum(correct.values()) == got["specstack_spec_decode_num_accepted_tokens_total"]


def test_a_merge_counts_its_drafters(tmp_path: Path) -> None:
    script = """
e = exporter(drafters=("block", "ngram"))
count(e, record((4,), (1, 0), drafts_per_drafter=(3, 2, 0), correct_per_drafter=(1, 0, 0)))
count(e, record((1,)))
"""
    got = scraped(tmp_path, script)
    drafts = "specstack_spec_decode_num_draft_tokens_per_drafter_total"
    correct = "specstack_spec_decode_num_accepted_tokens_per_drafter_total"
    assert got[f'{drafts}{{drafter="block"}}'] == 3
    assert got[f'{drafts}{{drafter="ngram"}}'] == 2
    assert got[f'{correct}{{drafter="block"}}'] == 1
    assert f'{correct}{{drafter="ngram"}}' not in got


def test_budgets_gates_shadows_and_forecasts_are_counted(tmp_path: Path) -> None:
    script = """
e = exporter()
sides = {"measured": (5, 0.1), "predicted": (4.5, 0.09), "plain": (2, 0.05), "shadow": (6, 0.2)}
count(e, record((1,), step_seconds=0.1, num_gated=1), watched=Budget(7, "goodput"), **sides)
count(e, record((1,), reason="collapsed", budget=0), watched=Budget(0, "off"), fallbacks=1)
count(e, record((1,)), eager=True)
e.prompts(cached=30, computed=12)
e.decided(2e-5)
e.identify({"plan_hash": "h", "drafter": "d", "tree": "t", "verify": "v", "budget": "b"},
           [{"place": "drafter", "form": "block", "digest": "0123"}])
e.identify({"plan_hash": "i", "drafter": "d", "tree": "t", "verify": "v", "budget": "c"})
"""
    got = scraped(tmp_path, script)
    assert got["specstack_gated_requests_total"] == 1
    assert got['specstack_shadow_rounds_total{draft_budget="7",reason="goodput"}'] == 1
    assert got['specstack_shadow_rounds_total{draft_budget="0",reason="off"}'] == 1
    assert got['specstack_goodput_tokens_total{side="measured"}'] == 5
    assert got['specstack_goodput_seconds_total{side="shadow"}'] == 0.2
    assert got["specstack_fallbacks_total"] == 1
    assert got["specstack_fallback_active"] == 0
    assert got["specstack_eager_fallbacks_total"] == 1
    assert got["specstack_step_seconds_count"] == 1
    assert got['specstack_prompt_tokens_total{source="cache"}'] == 30
    assert got['specstack_prompt_tokens_total{source="computed"}'] == 12
    assert got["specstack_decision_seconds_count"] == 1
    assert got['specstack_cost_table_info{key="",source="none"}'] == 1
    info = {n: value for n, value in got.items() if n.startswith("specstack_plan_info")}
    assert {n for n, value in info.items() if 'plan_hash="h"' in n and value == 0} != set()
    assert {n for n, value in info.items() if 'plan_hash="i"' in n and value == 1} != set()
    assert got['specstack_head_info{digest="0123",form="block",place="drafter"}'] == 1


def test_what_was_counted_before_is_looked_up_no_more(tmp_path: Path) -> None:
    """Neither the children of the metrics nor the name of the cost table."""
    script = """
from prometheus_client.metrics import MetricWrapperBase
from specstack.budget.costs import CostKey
from specstack.simulation.profiles import qwen3_8b_h100
controller.costs.use(qwen3_8b_h100().costs)
e = exporter(drafters=("block", "ngram"))
def again():
    per_drafter = dict(drafts_per_drafter=(2, 1), correct_per_drafter=(1, 0))
    count(e, record((2, 1), (2, 0), step_seconds=0.1, **per_drafter), plain=(2, 0.1))
    e.decided(1e-5)
again()
MetricWrapperBase.labels = CostKey.digest = None
again()
"""
    got = scraped(tmp_path, script)
    assert got['specstack_rounds_total{draft_budget="4",reason="fixed"}'] == 2
    assert got['specstack_spec_decode_num_draft_tokens_per_drafter_total{drafter="block"}'] == 4
    assert got['specstack_spec_decode_num_draft_tokens_per_drafter_total{drafter="ngram"}'] == 2


def test_the_cost_table_in_use_is_the_one_that_is_named(tmp_path: Path) -> None:
    script = """
from specstack.simulation.profiles import qwen3_8b_h100
table = qwen3_8b_h100().costs
e = exporter()
count(e, record())
for source in ("file", "measured"):
    controller.costs.use(table, source)
    count(e, record())
controller.costs.use(table.model_copy(), "measured")
count(e, record())
controller.costs.use(table.model_copy(update={"key": table.key.model_copy(update={"dtype": "?"})}))
count(e, record())
"""
    got = scraped(tmp_path, script)
    named = sorted(
        (value, "none" in name, "file" in name)
        for name, value in got.items() if name.startswith("specstack_cost_table_info")
    )  # fmt: skip
    assert named == [(0, False, False), (0, False, True), (0, True, False), (1, False, False)]


def test_requests_that_all_opted_out_are_no_time_off(tmp_path: Path) -> None:
    """Off is what the policy chose."""
    got = scraped(tmp_path, "count(exporter(), record(opted_out=2, reason='idle', budget=0))")
    assert got["specstack_off_seconds_total"] == 0


def test_without_per_position_there_are_no_such_series(tmp_path: Path) -> None:
    got = scraped(tmp_path, MIXED.replace("exporter()", "exporter(per_position=False)"))
    assert not any("position=" in name for name in got)
    assert got["specstack_spec_decode_num_accepted_tokens_total"] == 5


def test_several_processes_are_summed(tmp_path: Path) -> None:
    got = scraped(tmp_path, MIXED, processes=2)
    assert got["specstack_emitted_tokens_total"] == 22
    assert got["specstack_verify_seconds_count"] == 6
    assert got["specstack_draft_budget"] == 4
    assert got["specstack_num_draft_tokens"] == 5
    assert got["specstack_running_requests"] == 2


def test_counters_start_at_zero_rather_than_missing(tmp_path: Path) -> None:
    """A rate over a series that does not exist is empty, not zero."""
    got = scraped(tmp_path, "exporter()")
    counters = [m.name for m in METRICS if m.kind == "counter" and not m.labels]
    assert {f"specstack_{name}_total": 0.0 for name in counters}.items() <= got.items()


def test_two_workers_of_one_process_share_the_metrics(tmp_path: Path) -> None:
    script = """
one, two = exporter(), exporter()
count(one, record((1,), (1, 0)))
count(two, record())
"""
    got = scraped(tmp_path, script)
    assert got['specstack_rounds_total{draft_budget="4",reason="fixed"}'] == 2
    assert got["specstack_emitted_tokens_total"] == 5
    assert got["specstack_spec_decode_num_drafts_total"] == 1


@pytest.mark.parametrize("prefix", ["specstack", "a", "Team_1", "x" * 40])
def test_every_prefix_that_the_language_admits_makes_valid_names(
    tmp_path: Path, prefix: str
) -> None:
    got = scraped(tmp_path, f"exporter(prefix={prefix!r})")
    assert f"{prefix}_emitted_tokens_total" in got
    name = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
    assert all(name.fullmatch(f"{prefix}_{metric.name}") for metric in METRICS)


def test_a_disabled_exporter_registers_nothing() -> None:
    exporter = RoundExporter(MetricsPlan(prefix="p", per_position=True), "m", enabled=False)
    assert not exporter.enabled
    exporter.identify({}, [])
    exporter.decided(0.1)
    exporter.prompts(cached=1, computed=1)


def test_names_are_unique_and_documented() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(metric.help.endswith(".") for metric in METRICS)


def test_context_buckets_hold_their_upper_edge() -> None:
    edges = [0, *CONTEXT_EDGES]
    assert [context_bucket(edge) for edge in edges] == ["<=256", *CONTEXT_BUCKETS[:-1]]
    assert [context_bucket(edge + 1) for edge in CONTEXT_EDGES] == list(CONTEXT_BUCKETS[1:])
