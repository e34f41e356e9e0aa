"""The simulated server: admits requests, runs their prompts, then round after round.

What happens when: queued prompts first, as in SGLang, many at once up to `max_prefill_tokens`;
then rounds over all that run. Policies hear of a round one round later. Nothing is overlapped with
anything, memory never runs out, and no time passes but that of prompts and rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specstack.budget.base import Budget, Load
from specstack.budget.controller import BudgetController
from specstack.budget.costs import CostModel
from specstack.budget.oracle import OraclePolicy
from specstack.metrics.record import RoundRecord
from specstack.simulation.acceptance import Acceptance, Drafts
from specstack.simulation.run import Run, RunLog
from specstack.simulation.workload import Ints, Workload


@dataclass(frozen=True)
class Server:
    """What is the same for every policy."""

    workload: Workload
    acceptance: Acceptance
    costs: CostModel
    """The truth: it never learns."""
    oracle: OraclePolicy
    """Attached to the truth."""
    prefill_ms_per_token: float
    max_running: int = 64
    max_prefill_tokens: int = 8192


def simulate(
    server: Server,
    controller: BudgetController | None,
    progress: Callable[[int], None] = lambda _: None,
) -> Run:
    """Run the whole workload under one policy.

    Args:
        controller: decides; None: the oracle does.
        progress: told the number of requests that finished, after every round.
    """
    return _Simulation(server, controller).run(progress)


@dataclass(frozen=True)
class _Verified:
    """What a budget makes of the drafts of a round."""

    told: NDArray[np.floating[Any]]
    """[B, W] survivals that the record holds."""
    num_drafts: Ints
    ranks: Ints
    expected_tokens: float
    step_ms: float


class _Simulation:
    def __init__(self, server: Server, controller: BudgetController | None) -> None:
        self._server, self._controller = server, controller
        work = server.workload
        self._emitted = np.zeros(len(work), dtype=np.int64)
        self._drafted = np.zeros(len(work), dtype=np.int64)
        self._arrivals_ms = np.zeros(0) if work.arrivals is None else work.arrivals * 1e3
        self._names = [str(request) for request in range(len(work))]
        self._running: Ints = np.zeros(0, dtype=np.int64)
        self._next = 0
        self._num_finished = 0
        self._ms = 0.0
        self._held: RoundRecord | None = None
        self._log = RunLog(work)

    def run(self, progress: Callable[[int], None]) -> Run:
        while True:
            self._admit()
            if not len(self._running):
                if self._next >= len(self._server.workload):
                    break
                self._ms = float(self._arrivals_ms[self._next])
                continue
            if self._runs_dry():
                break
            self._round()
            progress(self._num_finished)
        return self._log.finish(self._ms)

    def _runs_dry(self) -> bool:
        """A closed load whose requests do not suffice to go on at its concurrency."""
        levels = self._server.workload.concurrency
        return (
            levels is not None
            and self._next >= len(levels)
            and len(self._running) < min(int(levels[-1]), self._server.max_running)
        )

    def _num_waiting(self) -> int:
        come = int(np.searchsorted(self._arrivals_ms, self._ms, side="right"))
        return max(0, come - self._next)

    def _may_start(self) -> int:
        """Requests that could start now."""
        work, num_running = self._server.workload, len(self._running)
        free = self._server.max_running - num_running
        if work.concurrency is not None:
            levels = work.concurrency[self._next : self._next + max(0, free)]
            fits = levels > num_running + np.arange(len(levels))
            return len(fits) if fits.all() else int(fits.argmin())
        return max(0, min(free, self._num_waiting()))

    def _admit(self) -> bool:
        """Run the prompts of all that may start."""
        work, admitted = self._server.workload, False
        while (count := self._may_start()) > 0:
            lens = np.cumsum(work.prompt_lens[self._next : self._next + count])
            fitting = int(np.searchsorted(lens, self._server.max_prefill_tokens, side="right"))
            count = max(1, fitting)
            started = np.arange(self._next, self._next + count)
            begun_ms = self._ms
            self._ms += float(lens[count - 1]) * self._server.prefill_ms_per_token
            self._next += count
            self._emitted[started] = 1
            self._log.started(started, begun_ms, self._ms)
            self._running = np.concatenate([self._running, started])
            self._leave()
            admitted = True
        return admitted

    def _leave(self) -> None:
        done = self._emitted[self._running] >= self._server.workload.output_lens[self._running]
        if done.any():
            self._log.finished(self._running[done], self._ms)
            self._num_finished += int(done.sum())
            self._running = self._running[~done]

    def _round(self) -> None:
        server, rows = self._server, self._running
        contexts = server.workload.prompt_lens[rows] + self._emitted[rows]
        load = Load(
            num_running=len(rows),
            num_queued=self._num_waiting(),
            context_lens=tuple(contexts.tolist()),
            request_ids=tuple([self._names[row] for row in rows.tolist()]),
        )
        drafts = server.acceptance.drafts(rows, self._emitted[rows], self._drafted[rows])
        server.oracle.foresee(drafts.chances)
        budget = server.oracle.next(load)
        best = done = self._verify(load, budget, drafts, drafts.chances)
        if self._controller is not None:
            budget = self._controller.next(load)
            done = self._verify(load, budget, drafts, drafts.survivals)
        record = _record(load, budget, done, self._ms)
        ideal_ms = done.expected_tokens * best.step_ms / best.expected_tokens
        begun_ms = self._ms
        self._ms += done.step_ms
        self._log.round(record, begun_ms, done.step_ms, ideal_ms, self._advance(record))
        if self._admit() or not len(self._running):
            record = replace(record, step_seconds=None)
        self._tell(record)

    def _verify(
        self, load: Load, budget: Budget, drafts: Drafts, told: NDArray[np.floating[Any]]
    ) -> _Verified:
        rows, width = load.num_running, budget.draft_budget
        told = told[:, :width]
        if budget.request_budgets is not None:
            told = told * (np.arange(width) < np.array(budget.request_budgets)[:, None])
        least = max(budget.min_survival, float(np.finfo(np.float32).tiny))
        num_drafts = np.count_nonzero(told >= least, axis=1)
        is_verified = np.arange(width) < num_drafts[:, None]
        computed = 1.0 + (float(num_drafts.mean()) if self._server.costs.ragged else width)
        step_ms = self._server.costs.step_ms(
            rows, load.mean_context, np.array([width]), np.array([[computed]])
        )
        return _Verified(
            told,
            num_drafts,
            np.where(drafts.ranks <= num_drafts[:, None], drafts.ranks, 0),
            rows + float((drafts.chances[:, :width] * is_verified).sum()),
            float(step_ms[0, 0]),
        )

    def _advance(self, record: RoundRecord) -> int:
        """Emit what is correct, up to the end of each answer; return how many tokens."""
        rows = self._running
        # Whether or not a price left any of the drafts: the next round is another one.
        self._drafted[rows[record.survivals.any(axis=1)]] += 1
        before = self._emitted[rows]
        after = np.minimum(
            before + 1 + np.array(record.num_correct), self._server.workload.output_lens[rows]
        )
        self._emitted[rows] = after
        self._leave()
        return int((after - before).sum())

    def _tell(self, record: RoundRecord) -> None:
        """Report the round before, now that one more was decided without it."""
        if self._controller is not None and self._held is not None:
            self._controller.observe(self._held)
        self._held = record


def _record(load: Load, budget: Budget, done: _Verified, now_ms: float) -> RoundRecord:
    """As serving makes it, but for depths and host times, which are not modelled."""
    width = budget.draft_budget
    correct = np.count_nonzero(done.ranks, axis=1)
    # Serving pads ranks behind; here they stand at the end of their row.
    ranks = np.sort(np.where(done.ranks > 0, done.ranks, np.iinfo(np.int64).max), axis=1)
    ranks[ranks == np.iinfo(np.int64).max] = 0
    return RoundRecord(
        num_requests=load.num_running,
        num_opted_out=0,
        num_drafting=int(np.count_nonzero(done.num_drafts)),
        draft_budget=width,
        reason=budget.reason,
        num_draft_tokens=1 + width,
        nodes_per_depth=(),
        draft_seconds=0.0,
        build_seconds=0.0,
        verify_seconds=done.step_ms / 1e3,
        accept_seconds=0.0,
        num_correct=tuple(correct.tolist()),
        min_survival=budget.min_survival,
        num_drafts=tuple(done.num_drafts.tolist()),
        survivals=np.asarray(done.told, dtype=np.float32),
        accept_ranks=ranks,
        request_ids=load.request_ids,
        context_lens=load.context_lens,
        num_queued=load.num_queued,
        started_at=now_ms / 1e3,
        step_seconds=done.step_ms / 1e3,
    )
