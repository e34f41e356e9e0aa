"""Prometheus metrics of the rounds, written in the scheduler process of rank 0.

SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its processes and merges them in `/metrics`.
prometheus_client chooses its mode at import, so it is imported when the worker is built.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

from specstack.metrics.definitions import METRICS, SECONDS_BUCKETS
from specstack.metrics.record import RoundRecord
from specstack.plan import MetricsPlan


class RoundExporter:
    """Counts rounds; accept counts arrive one scheduler step after their round."""

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
        self._awaiting: deque[RoundRecord] = deque()
        for metric in METRICS if enabled else ():
            if not metric.labels:
                self._family(metric.name)  # exported as 0 from the start

    def round(self, record: RoundRecord) -> None:
        """Count a round whose accept counts are still on the device."""
        if not self._families:
            return
        self._awaiting.append(record)
        self._add("rounds", 1, reason=record.reason)
        self._add("opted_out_requests", record.num_opted_out)
        self._add("spec_decode_num_draft_tokens", sum(record.nodes_per_depth))
        if self._per_position:
            for position, count in enumerate(record.nodes_per_depth):
                name = "spec_decode_num_draft_tokens_per_pos"
                self._add(name, count, position=str(position))
        counts = zip(record.drafts_per_drafter, record.correct_per_drafter, strict=True)
        for drafter, (drafts, correct) in zip(self._drafters, counts, strict=False):
            self._add("spec_decode_num_draft_tokens_per_drafter", drafts, drafter=drafter)
            self._add("spec_decode_num_accepted_tokens_per_drafter", correct, drafter=drafter)
        for phase in ("draft", "build", "verify", "accept"):
            seconds = getattr(record, f"{phase}_seconds")
            self._family(f"{phase}_seconds").observe(seconds)
        self._family("draft_budget").set(record.draft_budget)
        self._family("num_draft_tokens").set(record.num_draft_tokens)

    def verified(self, num_correct_drafts: list[int]) -> None:
        """Count the accepted drafts of the oldest round that waits for them."""
        if not self._families:
            return
        record = self._awaiting.popleft()
        self._add("emitted_tokens", sum(num_correct_drafts) + len(num_correct_drafts))
        if record.nodes_per_depth:
            self._add("spec_decode_num_drafts", record.num_drafting)
        self._add("spec_decode_num_accepted_tokens", sum(num_correct_drafts))
        if self._per_position:
            for position in range(max(num_correct_drafts, default=0)):
                count = sum(n > position for n in num_correct_drafts)
                name = "spec_decode_num_accepted_tokens_per_pos"
                self._add(name, count, position=str(position))

    def _family(self, name: str, **extra: str) -> Any:
        return self._families[name].labels(**self._labels, **extra)

    def _add(self, name: str, amount: int, **extra: str) -> None:
        if amount:
            self._family(name, **extra).inc(amount)


@cache
def _families(prefix: str, labels: tuple[str, ...]) -> dict[str, Any]:
    """The metrics of this process: workers with the same prefix share them."""
    from prometheus_client import Counter, Gauge, Histogram

    families: dict[str, Any] = {}
    for metric in METRICS:
        name, names = f"{prefix}_{metric.name}", (*labels, *metric.labels)
        if metric.kind == "counter":
            families[metric.name] = Counter(name, metric.help, names)
        elif metric.kind == "gauge":
            families[metric.name] = Gauge(name, metric.help, names, multiprocess_mode="mostrecent")
        else:
            families[metric.name] = Histogram(name, metric.help, names, buckets=SECONDS_BUCKETS)
    return families
