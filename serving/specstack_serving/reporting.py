"""From finished rounds to everybody who reads them: policies, metrics, trace.

A round is reported when the scheduler has its accept counts, one or two rounds after it ran.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specstack.budget.base import Budget, Load
from specstack.budget.controller import BudgetController
from specstack.metrics.trace import TraceWriter
from specstack.outcome import RoundOutcome
from specstack_serving.exporter import RoundExporter

PAUSE_SECONDS = 1.0
"""What lies between two rounds beyond this, and beyond the time of a round, is a pause."""


@dataclass(frozen=True)
class _Waiting:
    """A round whose accept counts the scheduler has not seen yet."""

    outcome: RoundOutcome
    load: Load
    has_ended: Callable[[], list[bool]]
    started_at: float
    step_seconds: float | None
    is_eager_fallback: bool


class RoundReporter:
    """Decides budgets and reports rounds, in the order in which they ran."""

    def __init__(
        self,
        controller: BudgetController,
        exporter: RoundExporter,
        trace: TraceWriter | None,
        agree: Callable[[Budget], Budget],
    ) -> None:
        """Report to all of these.

        Args:
            agree: the first rank's budget: ranks measure different times.
        """
        self.controller = controller
        self.exporter = exporter
        self._trace = trace
        self._agree = agree
        self._waiting: deque[_Waiting] = deque()
        self._started_at = 0.0
        self._last_end: float | None = None

    def decide(self, load: Load) -> Budget:
        """The budget of the round that starts now."""
        self._started_at = time.time()
        started = time.perf_counter()
        own = self.controller.next(load)
        self.exporter.decided(time.perf_counter() - started)
        budget = self._agree(own)
        if budget != own:
            self.controller.impose(budget)
        return budget

    def ran(
        self,
        outcome: RoundOutcome,
        load: Load,
        has_ended: Callable[[], list[bool]],
        *,
        is_eager_fallback: bool,
    ) -> None:
        """A round has ended, as far as the host is concerned.

        Args:
            has_ended: which requests an earlier round has ended, asked when the counts are there.
        """
        end = time.perf_counter()
        step = None if self._last_end is None else end - self._last_end
        self._last_end = end
        if step is not None and step > PAUSE_SECONDS + 2 * outcome.seconds:
            step = None
        waiting = _Waiting(outcome, load, has_ended, self._started_at, step, is_eager_fallback)
        self._waiting.append(waiting)

    def prefilled(self, cached: int, computed: int) -> None:
        """Prompts ran instead of a round: the time of the coming step says nothing."""
        self._last_end = None
        self.exporter.prompts(cached=cached, computed=computed)

    def verified(self, num_correct: list[int]) -> None:
        """Report the oldest round that waits."""
        waiting = self._waiting.popleft()
        load = waiting.load
        record = waiting.outcome.record(
            waiting.has_ended(),
            request_ids=load.request_ids,
            context_lens=load.context_lens,
            num_queued=load.num_queued,
            kv_usage=load.kv_usage,
            started_at=waiting.started_at,
            step_seconds=waiting.step_seconds,
        )
        assert len(num_correct) == record.num_requests
        report = self.controller.observe(record)
        self.exporter.round(report, self.controller, is_eager_fallback=waiting.is_eager_fallback)
        if self._trace is not None:
            self._trace.write(record)
