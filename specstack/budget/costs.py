"""`CostModel`: what a round would take, from a measured table, refined by every round since.

Without a table it only collects samples, from which `fit` makes one. The same records in the same
order leave the same model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from math import exp, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specstack.budget.cost_curve import CostCurve, between
from specstack.budget.cost_fit import Sample, fit_table
from specstack.budget.cost_table import CostKey, CostTable, CostTableError
from specstack.metrics.record import RoundRecord

__all__ = ["CostKey", "CostModel", "CostTable", "CostTableError", "Sample"]

MAX_SAMPLES = 4096
CONTEXT_STEP = 64
"""Tokens: contexts that are nearer than this cost the same."""

SPEED_RATE = 0.1
"""Share of a round's surprise that the speed of the whole machine takes."""
CORRECTION_RATE = 0.015
"""Share that the correction of one cell takes: slower, so that what slows down everything is not
held against the budget that happened to be in use."""
MEASURED = 24.0
"""Rounds that a cell of the table is worth: what is seldom seen learns faster from each round."""
CORRECTION_LIMIT = log(2.0)
FORGET = 0.5 ** (1 / 2048)
"""Per round: what was not seen for some thousand rounds is what the table says again."""
OUTLIER = log(5.0)
LASTING = 16
"""Outliers in a row from which one is taken for what rounds cost now."""
_STALE = 0.01
"""Change of a log correction from which curves are made anew."""
_MAX_CURVES = 1024


class CostModel:
    """Predicts the time of rounds; all times are of the machine as a whole."""

    def __init__(
        self, table: CostTable | None, *, ragged: bool = True, source: str = "file"
    ) -> None:
        """Take a table, or None when nothing is known yet.

        Args:
            ragged: a node that is not verified costs nothing; False: all are padded to the budget.
            source: where the table came from, for people: "file" or "measured".
        """
        self.ragged = ragged
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._curves: dict[tuple[int, int], CostCurve] = {}
        self._take(table, source if table else "none")

    def _take(self, table: CostTable | None, source: str) -> None:
        self.table = table
        self.source = source
        self.num_outliers = 0
        self._in_a_row = 0
        self.num_observed = 0
        self._log_speed = 0.0
        self._speed = 1.0
        shape = (len(table.num_requests), len(table.draft_budgets)) if table else (0, 0)
        self._learned = np.zeros(shape)  # log corrections
        self._used = np.zeros(shape)  # those that the curves were made with
        self._seen = np.zeros(shape)  # recent rounds
        self._curves.clear()
        if table:
            self._verify = np.moveaxis(np.asarray(table.verify_ms), 2, 0)  # [C, R, W]
            self._draft = np.asarray(table.draft_ms)
            self._budgets = np.asarray(table.draft_budgets, dtype=np.float64)

    @property
    def ready(self) -> bool:
        """Whether there is a table."""
        return self.table is not None

    def use(self, table: CostTable, source: str = "measured") -> None:
        """Go on with another table; what was learned about the old one is dropped."""
        self._take(table, source)

    def step_ms(
        self,
        num_requests: int,
        mean_context: float,
        draft_budgets: NDArray[np.int64],
        num_tokens: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Milliseconds of a round, for C budgets and L prices at once: [C, L].

        Args:
            mean_context: committed tokens per request.
            draft_budgets: [C], what is drafted up to; 0 decodes plainly, whatever `num_tokens`.
            num_tokens: [C, L], verified per request on average, root included. Only the shape
                matters where the engine pads.

        Raises:
            CostTableError: there is no table.
        """
        curve = self._curve(num_requests, mean_context)
        return curve.step_ms(draft_budgets, num_tokens) * self._speed

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round whose step was timed; others are ignored.

        With m = log(measured / table), the speed s and the correction c of the cell follow
        s += SPEED_RATE (m - s - c) and c += CORRECTION_RATE (m - s - c).
        """
        if not record.step_seconds or not record.num_requests:
            return
        sample = sample_of(record, self.ragged)
        if not record.num_opted_out:
            self._samples.append(sample)
        if self.table is None:
            return
        curve = self._curve(sample.num_requests, sample.context)
        cell = (
            _nearest(self.table.num_requests, sample.num_requests),
            _nearest(self.table.draft_budgets, sample.draft_budget),
        )
        table_ms = curve.raw_ms(sample.draft_budget, sample.num_tokens)
        surprise = log(sample.step_ms / table_ms) - self._log_speed - self._learned[cell]
        if abs(surprise) > OUTLIER and self._in_a_row < LASTING:
            self._in_a_row += 1
            self.num_outliers += 1
            return
        self._in_a_row = 0
        self.num_observed += 1
        self._log_speed += SPEED_RATE * surprise
        self._speed = exp(self._log_speed)
        self._learned *= FORGET
        self._seen *= FORGET
        self._seen[cell] += 1.0
        rate = max(CORRECTION_RATE, 1.0 / (MEASURED + self._seen[cell]))
        correction = self._learned[cell] + rate * surprise
        self._learned[cell] = min(max(correction, -CORRECTION_LIMIT), CORRECTION_LIMIT)
        if np.abs(self._learned - self._used).max() > _STALE:
            self._used = self._learned.copy()
            self._curves.clear()

    def fit(self, key: CostKey, command: str, measured_at: str | None = None) -> CostTable:
        """Make a table of the collected samples; goes on with the one in use until `use`.

        Raises:
            CostTableError: the samples do not suffice, or are flat; says what is missing.
        """
        return fit_table(self._samples, key, command, measured_at)

    def clear_samples(self) -> None:
        """Forget what was collected for `fit`; the table and what was learned stay."""
        self._samples.clear()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What `fit` would use, oldest first."""
        return tuple(self._samples)

    @property
    def drift(self) -> float:
        """Root mean square, over recent rounds, of the share by which cells are corrected."""
        seen = float(self._seen.sum())
        if not seen:
            return 0.0
        return sqrt(float((self._seen * np.expm1(self._used) ** 2).sum()) / seen)

    @property
    def state(self) -> Mapping[str, Any]:
        """What it knows, for people: small, JSON."""
        state: dict[str, Any] = {
            "key": self.table.key.digest if self.table else "",
            "source": self.source,
            "measured_at": self.table.measured_at if self.table else "",
            "num_samples": len(self._samples),
            "num_observed": self.num_observed,
            "num_outliers": self.num_outliers,
            "speed": round(self._speed, 4),
            "drift": round(self.drift, 4),
        }
        if self.table:
            state["corrections"] = {
                f"{self.table.num_requests[r]}x{self.table.draft_budgets[w]}": round(
                    exp(self._used[r, w]), 3
                )
                for r, w in np.argwhere(np.abs(self._used) > _STALE).tolist()
            }
        return state

    def _curve(self, num_requests: int, mean_context: float) -> CostCurve:
        if self.table is None:
            raise CostTableError("there is no cost table yet: run `specstack bench cost`")
        bucket = int(mean_context / CONTEXT_STEP + 0.5)
        curve = self._curves.get((num_requests, bucket))
        if curve is None:
            if len(self._curves) >= _MAX_CURVES:
                self._curves.clear()
            axis = self.table.num_requests
            verify = between(self.table.contexts, bucket * CONTEXT_STEP, self._verify)
            verify = np.maximum.accumulate(verify, axis=0)  # beyond the contexts it may fall
            curve = self._curves[num_requests, bucket] = CostCurve(
                self._budgets,
                between(axis, num_requests, verify),
                between(axis, num_requests, self._draft),
                np.exp(self._used[_nearest(axis, num_requests)]),
                self.ragged,
            )
        return curve


def sample_of(record: RoundRecord, ragged: bool) -> Sample:
    """What a timed record says about costs; the tokens are what the engine computed."""
    assert record.step_seconds is not None
    num_tokens: float = record.num_draft_tokens
    if ragged:
        num_tokens = 1.0 + sum(record.num_drafts) / record.num_requests
    contexts = record.context_lens
    return Sample(
        num_requests=record.num_requests,
        draft_budget=record.draft_budget,
        num_tokens=num_tokens,
        context=sum(contexts) / len(contexts) if contexts else 0.0,
        draft_ms=min(record.draft_seconds, record.step_seconds) * 1e3,
        step_ms=record.step_seconds * 1e3,
    )


def _nearest(axis: Sequence[int], value: int) -> int:
    """Index of the entry of a rising axis that is nearest to `value`; of two the smaller."""
    right = min(bisect_left(axis, value), len(axis) - 1)
    left = max(right - 1, 0)
    return left if value - axis[left] <= axis[right] - value else right
