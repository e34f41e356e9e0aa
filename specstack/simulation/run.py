"""What one policy did to a workload, and the measures of that.

Letters: N requests, R rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specstack.metrics.record import RoundRecord
from specstack.simulation.workload import Floats, Ints, Workload


@dataclass(frozen=True)
class Run:
    """Times of requests [N] and of rounds [R]; NaN where a request did not get that far."""

    ttft_ms: Floats
    """From arrival to the first token, queueing included."""
    tpot_ms: Floats
    """Between tokens after the first, per finished request of more than one token."""
    output_lens: Ints
    total_ms: float
    num_tokens: int
    """Emitted, first tokens included."""
    at_ms: Floats
    """Starts of rounds."""
    step_ms: Floats
    ideal_ms: Floats
    """What the oracle would have taken at the same load for the tokens that were to be expected."""
    num_running: Ints
    draft_budgets: Ints
    num_drafts: int
    """Verified, over all rounds."""
    num_correct: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_ms * 1e3

    @property
    def mean_tpot_ms(self) -> float:
        """Over tokens: long answers count more."""
        weights = np.where(np.isfinite(self.tpot_ms), self.output_lens - 1, 0)
        total = float(weights.sum())
        return float(np.nan_to_num(self.tpot_ms) @ weights) / total if total else 0.0

    @property
    def regret(self) -> float:
        """Share of the time in rounds that the oracle would have saved, at this policy's loads."""
        total = float(self.step_ms.sum())
        return 1.0 - float(self.ideal_ms.sum()) / total if total else 0.0

    def measures(self) -> dict[str, float]:
        """Numbers by name; times in milliseconds, shares in [0, 1]."""
        weights = self.step_ms / max(float(self.step_ms.sum()), 1e-9)
        return {
            "tokens_per_s": self.tokens_per_s,
            "mean_tpot_ms": self.mean_tpot_ms,
            "p99_tpot_ms": _percentile(self.tpot_ms, 99),
            "p50_ttft_ms": _percentile(self.ttft_ms, 50),
            "p99_ttft_ms": _percentile(self.ttft_ms, 99),
            "mean_budget": float(self.draft_budgets.mean()),
            "num_switches": float(np.count_nonzero(np.diff(self.draft_budgets))),
            "share_off": float(weights[self.draft_budgets == 0].sum()),
            "wasted_drafts": float(self.num_drafts - self.num_correct),
            "accept_length": 1.0 + self.num_correct / float(self.num_running.sum()),
            "mean_running": float(self.num_running @ weights),
            "num_rounds": float(len(self.step_ms)),
            "num_finished": float(np.isfinite(self.tpot_ms).sum()),
            "regret": self.regret,
        }


def _percentile(values: Floats, percent: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.percentile(known, percent)) if len(known) else 0.0


class RunLog:
    """Collects a run."""

    def __init__(self, workload: Workload) -> None:
        count = len(workload)
        self._workload = workload
        self._first_ms = np.full(count, np.nan)
        self._last_ms = np.full(count, np.nan)
        self._came_ms = np.full(count, np.nan)
        self._rounds: list[tuple[float, float, float, int, int]] = []
        self._num_tokens = self._num_drafts = self._num_correct = 0

    def started(self, requests: Ints, begun_ms: float, first_token_ms: float) -> None:
        """Prompts ran: a request of a closed loop comes when its prompt begins."""
        arrivals = self._workload.arrivals
        self._came_ms[requests] = begun_ms if arrivals is None else arrivals[requests] * 1e3
        self._first_ms[requests] = first_token_ms
        self._num_tokens += len(requests)

    def finished(self, requests: Ints, now_ms: float) -> None:
        """The last token of these was emitted."""
        self._last_ms[requests] = now_ms

    def round(
        self, record: RoundRecord, begun_ms: float, step_ms: float, ideal_ms: float, tokens: int
    ) -> None:
        """A round that emitted so many tokens, without those beyond the ends of answers."""
        self._rounds.append((begun_ms, step_ms, ideal_ms, record.num_requests, record.draft_budget))
        self._num_drafts += sum(record.num_drafts)
        self._num_correct += sum(record.num_correct)
        self._num_tokens += tokens

    def finish(self, total_ms: float) -> Run:
        """Return the run."""
        at, step, ideal, running, budgets = np.array(self._rounds).reshape(-1, 5).T
        after_first = self._workload.output_lens - 1
        spent = self._last_ms - self._first_ms
        tpot = np.where(after_first > 0, spent / np.maximum(after_first, 1), np.nan)
        return Run(
            ttft_ms=self._first_ms - self._came_ms,
            tpot_ms=tpot,
            output_lens=self._workload.output_lens,
            total_ms=total_ms,
            num_tokens=self._num_tokens,
            at_ms=at,
            step_ms=step,
            ideal_ms=ideal,
            num_running=running.astype(np.int64),
            draft_budgets=budgets.astype(np.int64),
            num_drafts=self._num_drafts,
            num_correct=self._num_correct,
        )
