"""Rounds reach policies and metrics in their order, and their clock knows what came between."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specstack.budget.base import Budget, Load
from specstack.budget.controller import BudgetController, Policies, Report
from specstack.budget.costs import CostModel
from specstack.budget.fixed import FixedPolicy
from specstack.metrics.record import RoundRecord
from specstack.plan import MetricsPlan
from specstack_serving.exporter import RoundExporter
from specstack_serving.load import PromptTally
from specstack_serving.reporting import PAUSE_SECONDS, RoundReporter

LOAD = Load(1, context_lens=(5,), request_ids=("a",))


class Outcome:
    """A round of 10 ms that one request ended or not."""

    seconds = 0.01

    def record(self, ended: list[bool], **known: Any) -> RoundRecord:
        self.made = RoundRecord(
            num_requests=1, num_opted_out=0, num_drafting=0, draft_budget=0, reason="fixed",
            num_draft_tokens=1, nodes_per_depth=(), draft_seconds=0.0, build_seconds=0.0,
            verify_seconds=0.01, accept_seconds=0.0, num_correct=(0,), num_drafts=(0,),
            ended=tuple(map(int, ended)), **known,
        )  # fmt: skip
        return self.made


class Listener(RoundExporter):
    """Keeps what is reported."""

    def __init__(self) -> None:
        super().__init__(MetricsPlan(prefix="p", per_position=True), "m", enabled=False)
        self.reports: list[Report] = []

    def round(self, report: Report, *args: Any, **kwargs: Any) -> None:
        self.reports.append(report)


class Clock:
    """Seconds that a test sets."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def make_reporter(agreed: Budget | None = None) -> tuple[RoundReporter, Listener]:
    policies = Policies(FixedPolicy(0), (0,))
    controller = BudgetController(policies, CostModel(None), ragged=True)
    listener = Listener()
    return RoundReporter(controller, listener, None, lambda own: agreed or own), listener


def run(reporter: RoundReporter, *ended: bool) -> None:
    reporter.decide(LOAD)
    outcome: Any = Outcome()
    reporter.ran(outcome, LOAD, lambda: list(ended), is_eager_fallback=False)


def test_a_step_is_timed_from_round_to_round_unless_something_came_between(clock: Clock) -> None:
    reporter, listener = make_reporter()
    gaps = (0.0, 0.02, 0.03, PAUSE_SECONDS + 0.5, 0.02)
    for gap in gaps:
        clock.now += gap
        run(reporter, False)
    clock.now += 0.02
    reporter.prefilled(cached=0, computed=7)
    run(reporter, False)
    for _ in range(6):
        reporter.verified([0])
    steps = [report.record.step_seconds for report in listener.reports]
    assert steps[1:3] + steps[4:5] == pytest.approx([0.02, 0.03, 0.02])
    assert [steps[0], steps[3], steps[5]] == [None] * 3, "the first, a pause, a prompt"


def test_reports_follow_the_rounds_although_counts_come_later(clock: Clock) -> None:
    """Which requests had ended is asked when the counts are there, not when the round ran."""
    reporter, listener = make_reporter()
    has_ended = [False]
    outcome: Any = Outcome()
    for _ in range(2):
        reporter.decide(LOAD)
        reporter.ran(outcome, LOAD, lambda: list(has_ended), is_eager_fallback=False)
    reporter.verified([0])
    has_ended[0] = True
    reporter.verified([0])
    assert [report.record.ended for report in listener.reports] == [(0,), (1,)]
    assert [report.record.num_emitted for report in listener.reports] == [1, 0]
    assert listener.reports[0].record.request_ids == ("a",)


def test_a_record_is_made_once_with_what_the_engine_knew(clock: Clock) -> None:
    reporter, listener = make_reporter()
    load = replace(LOAD, num_queued=3, kv_usage=0.25)
    outcome: Any = Outcome()
    reporter.decide(load)
    reporter.ran(outcome, load, lambda: [False], is_eager_fallback=False)
    reporter.verified([0])
    record = listener.reports[0].record
    assert record is outcome.made
    assert (record.request_ids, record.context_lens) == (("a",), (5,))
    assert (record.num_queued, record.kv_usage, record.step_seconds) == (3, 0.25, None)


def test_another_ranks_budget_is_taken_and_reported(clock: Clock) -> None:
    reporter, listener = make_reporter(Budget(3, "rank 0"))
    assert reporter.decide(LOAD) == Budget(3, "rank 0")
    outcome: Any = Outcome()
    reporter.ran(outcome, LOAD, lambda: [False], is_eager_fallback=False)
    reporter.verified([0])
    assert listener.reports[0].decision.budget == Budget(3, "rank 0")


def prefill(*parts: tuple[str, int, int, int]) -> Any:
    """Requests as (name, tokens cached or done, end of this part, tokens of the prompt)."""
    reqs = [
        SimpleNamespace(
            rid=name, get_fill_ids=lambda end=end: [0] * end, full_untruncated_fill_ids=[0] * whole
        )
        for name, _, end, whole in parts
    ]
    return SimpleNamespace(reqs=reqs, prefix_lens=[prefix for _, prefix, _, _ in parts])


def test_parts_of_a_prompt_are_not_taken_for_hits_of_the_cache() -> None:
    tally = PromptTally()
    assert tally.take(prefill(("a", 0, 4, 4), ("b", 3, 8, 20))) == (3, 9)
    assert tally.take(prefill(("b", 8, 16, 20))) == (0, 8)
    assert tally.take(prefill(("b", 16, 20, 20), ("c", 2, 5, 5))) == (2, 7)
    assert tally.take(prefill(("b", 16, 20, 20))) == (16, 4), "control: asked again"


def test_a_prompt_that_starts_again_with_less_in_the_cache_counts_nothing_back() -> None:
    tally = PromptTally()
    tally.take(prefill(("b", 0, 8, 20)))
    assert tally.take(prefill(("b", 2, 20, 20))) == (0, 18)
