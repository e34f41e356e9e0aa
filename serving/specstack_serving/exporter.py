"""Prometheus metrics of the rounds, written in the scheduler process of rank 0.

SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its processes and merges them in `/metrics`.
prometheus_client chooses its mode at import, so it is imported when the worker is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from specstack.budget.controller import BudgetController, Report
from specstack.budget.costs import CostTable
from specstack.metrics.definitions import METRICS, context_bucket
from specstack.metrics.record import RoundRecord
from specstack.plan import MetricsPlan

PHASES = ("draft", "build", "verify", "accept")


class RoundExporter:
    """Counts rounds once their accept counts are known."""

    def __init__(
        self,
        metrics: MetricsPlan,
        model_name: str,
        *,
        enabled: bool,
        drafters: Sequence[str] = (),
    ) -> None:
        """Register the metrics.

        Args:
            enabled: False on all ranks but one, and when the server exports nothing.
            drafters: names of a merge's, in its order.
        """
        self._drafters = drafters
        self._labels = {"model_name": model_name}
        self._per_position = metrics.per_position
        self._families = _families(metrics.prefix, tuple(self._labels)) if enabled else {}
        self._children: dict[tuple[Any, ...], Any] = {}
        self._cost_table: CostTable | None = None
        self._cost_source = ""
        self._cost_info: Any = None
        self._plan_labels: dict[str, str] | None = None
        for metric in METRICS if enabled else ():
            if not metric.labels:
                self._family(metric.name)  # exported as 0 from the start

    @property
    def enabled(self) -> bool:
        """Whether anything is exported."""
        return bool(self._families)

    def identify(self, plan: dict[str, str], heads: Sequence[dict[str, str]] = ()) -> None:
        """Export who runs: labels of `plan_info`, and of one `head_info` per head."""
        if not self.enabled:
            return
        if self._plan_labels is not None:
            self._family("plan_info", **self._plan_labels).set(0)
        self._family("plan_info", **plan).set(1)
        self._plan_labels = plan
        for head in heads:
            self._family("head_info", **head).set(1)

    def decided(self, seconds: float) -> None:
        """Count the time of one decision."""
        if self.enabled:
            self._family("decision_seconds").observe(seconds)

    def prompts(self, *, cached: int, computed: int) -> None:
        """Count tokens of prompts."""
        if self.enabled:
            self._add("prompt_tokens", cached, source="cache")
            self._add("prompt_tokens", computed, source="computed")

    def round(
        self, report: Report, controller: BudgetController, *, is_eager_fallback: bool
    ) -> None:
        """Count a round."""
        if not self.enabled:
            return
        record = report.record
        self._drafts(record)
        for phase in PHASES:
            self._family(f"{phase}_seconds").observe(getattr(record, f"{phase}_seconds"))
        if record.step_seconds is not None:
            self._family("step_seconds").observe(record.step_seconds)
        for name, value in (
            ("draft_budget", record.draft_budget),
            ("num_draft_tokens", record.num_draft_tokens),
            ("running_requests", record.num_requests),
            ("queued_requests", record.num_queued),
            ("kv_usage", record.kv_usage),
        ):
            self._family(name).set(value)
        self._budget(report, controller)
        self._add("eager_fallbacks", is_eager_fallback)
        self._costs(controller)

    def _drafts(self, record: RoundRecord) -> None:
        drafts, correct = sum(record.nodes_per_depth), sum(record.num_correct)
        self._add("rounds", 1, draft_budget=str(record.draft_budget), reason=record.reason)
        self._add("opted_out_requests", record.num_opted_out)
        self._add("emitted_tokens", record.num_emitted)
        self._add("spec_decode_num_drafts", record.num_drafting)
        self._add("spec_decode_num_draft_tokens", drafts)
        self._add("spec_decode_num_accepted_tokens", correct)
        self._add("wasted_drafts", drafts - correct)
        if self._per_position:
            for position, count in enumerate(record.nodes_per_depth):
                name = "spec_decode_num_draft_tokens_per_pos"
                self._add(name, count, position=str(position))
            for position in range(max(record.num_correct, default=0)):
                count = sum(n > position for n in record.num_correct)
                name = "spec_decode_num_accepted_tokens_per_pos"
                self._add(name, count, position=str(position))
        if drafts:
            self._contexts(record)
        counts = zip(record.drafts_per_drafter, record.correct_per_drafter, strict=True)
        for drafter, (proposed, accepted) in zip(self._drafters, counts, strict=False):
            self._add("spec_decode_num_draft_tokens_per_drafter", proposed, drafter=drafter)
            self._add("spec_decode_num_accepted_tokens_per_drafter", accepted, drafter=drafter)

    def _contexts(self, record: RoundRecord) -> None:
        rounds, drafts, correct = Counter[str](), Counter[str](), Counter[str]()
        columns = record.context_lens, record.counted_drafts, record.num_correct
        for context, num_drafts, num_correct in zip(*columns, strict=True):
            if num_drafts:
                bucket = context_bucket(context)
                rounds[bucket] += 1
                drafts[bucket] += num_drafts
                correct[bucket] += num_correct
        for name, counts in (
            ("spec_decode_num_drafts_per_context", rounds),
            ("spec_decode_num_draft_tokens_per_context", drafts),
            ("spec_decode_num_accepted_tokens_per_context", correct),
        ):
            for bucket, count in counts.items():
                self._add(name, count, context=bucket)

    def _budget(self, report: Report, controller: BudgetController) -> None:
        record, decision = report.record, report.decision
        self._add("budget_switches", report.is_switch)
        if record.draft_budget == 0 and record.num_opted_out < record.num_requests:
            seconds = record.step_seconds
            self._add("off_seconds", record.round_seconds if seconds is None else seconds)
        self._add("gated_requests", record.num_gated)
        if decision.shadow is not None:
            chosen = {
                "draft_budget": str(decision.shadow.draft_budget),
                "reason": decision.shadow.reason,
            }
            self._add("shadow_rounds", 1, **chosen)
        for side, (tokens, seconds) in report.sides.items():
            self._add("goodput_tokens", tokens, side=side)
            self._add("goodput_seconds", seconds, side=side)
        self._family("fallback_active").set(controller.guard.active)
        self._add("fallbacks", report.num_fallbacks)

    def _costs(self, controller: BudgetController) -> None:
        table, source = controller.costs.table, controller.costs.source
        if table is not self._cost_table or source != self._cost_source:
            self._cost_table, self._cost_source = table, source
            if self._cost_info is not None:
                self._cost_info.set(0)
            digest = table.key.digest if table else ""
            self._cost_info = self._family("cost_table_info", key=digest, source=source)
            self._cost_info.set(1)
        self._family("cost_table_drift").set(controller.costs.drift)

    def _family(self, name: str, **extra: str) -> Any:
        """What a family counts under these labels; looked up once, as that takes longer."""
        key = name, *extra.items()
        child = self._children.get(key)
        if child is None:
            child = self._families[name].labels(**self._labels, **extra)
            self._children[key] = child
        return child

    def _add(self, name: str, amount: float, **extra: str) -> None:
        if amount:
            self._family(name, **extra).inc(amount)


@cache
def _families(prefix: str, labels: tuple[str, ...]) -> dict[str, Any]:
    """The metrics of this process: workers with the same prefix share them."""
    import prometheus_client

    families: dict[str, Any] = {}
    for metric in METRICS:
        name, names = f"{prefix}_{metric.name}", (*labels, *metric.labels)
        if metric.kind == "counter":
            family: Any = prometheus_client.Counter(name, metric.help, names)
        elif metric.kind == "gauge":
            family = prometheus_client.Gauge(
                name, metric.help, names, multiprocess_mode="mostrecent"
            )
        else:
            family = prometheus_client.Histogram(name, metric.help, names, buckets=metric.buckets)
        families[metric.name] = family
    return families
