"""What a round takes by its budget, for one batch size and one context: a cut through a table.

Letters: W budgets of the table, C budgets asked for, L prices asked for.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from specstack.budget.monotone import isotonic

_FAR = 1 << 20
"""Tokens: nothing is asked for beyond."""

Floats = NDArray[np.float64]


def between(axis: tuple[int, ...], value: float, rows: Floats) -> Floats:
    """Interpolate `rows` [N, ...], that stand at `axis` [N], at `value`.

    Before the axis the first row holds; beyond it the last slope goes on, where it is positive.
    """
    if len(axis) == 1 or value <= axis[0]:
        first: Floats = rows[0]
        return first
    left = min(bisect_right(axis, value), len(axis) - 1) - 1
    share = (value - axis[left]) / (axis[left + 1] - axis[left])
    found: Floats = rows[left] + share * np.maximum(rows[left + 1] - rows[left], 0.0)
    return found


class CostCurve:
    """Milliseconds by budget and verified tokens."""

    def __init__(
        self, budgets: Floats, verify_ms: Floats, draft_ms: Floats, factors: Floats, ragged: bool
    ) -> None:
        """Take a cut through the table: all [W]; `factors` correct whole steps.

        The corrected time of full trees is made to rise along the budgets again.
        """
        verify = np.maximum.accumulate(verify_ms)
        full = verify + np.maximum.accumulate(draft_ms)
        self._budgets = budgets
        self._factors = isotonic(full * factors) / full
        self._draft = np.maximum.accumulate(draft_ms)
        self._ragged = ragged
        self._plain = float(verify[0])
        self._nodes, self._times = _drafting_curve(budgets, verify)
        self._columns: dict[bytes, tuple[Floats, Floats, Floats, NDArray[np.intp]]] = {}

    def step_ms(self, draft_budgets: NDArray[np.int64], num_tokens: Floats) -> Floats:
        """Corrected milliseconds [C, L]; see `CostModel.step_ms`."""
        verify, draft, factors, plain = self._column(draft_budgets)
        if not self._ragged:
            return np.broadcast_to((verify + draft) * factors, num_tokens.shape)
        times: Floats = np.interp(num_tokens, self._nodes, self._times)
        times += draft
        times *= factors
        if plain.size:
            times[plain] = self._plain * factors[plain]
        return times

    def raw_ms(self, draft_budget: int, num_tokens: float) -> float:
        """Milliseconds of one choice as the table has them, uncorrected."""
        if draft_budget == 0:
            return self._plain
        where = num_tokens if self._ragged else 1.0 + draft_budget
        verify = float(np.interp(where, self._nodes, self._times))
        return verify + float(_extended(draft_budget, self._budgets, self._draft))

    def _column(
        self, draft_budgets: NDArray[np.int64]
    ) -> tuple[Floats, Floats, Floats, NDArray[np.intp]]:
        """Per budget asked for, [C, 1]: verify time of full trees, draft time, factor; and rows of
        budget 0."""
        name = draft_budgets.tobytes()
        if name not in self._columns:
            plain = draft_budgets == 0
            full = np.interp(draft_budgets + 1, self._nodes, self._times)
            verify = np.where(plain, self._plain, full)
            draft = _extended(draft_budgets, self._budgets, self._draft)
            factors = np.interp(draft_budgets, self._budgets, self._factors)
            self._columns[name] = (
                verify[:, None], draft[:, None], factors[:, None], np.flatnonzero(plain),
            )  # fmt: skip
        return self._columns[name]


def _drafting_curve(budgets: Floats, verify: Floats) -> tuple[Floats, Floats]:
    """Verify time over verified tokens in rounds that draft: nodes and values for `np.interp`.

    Trees cost something that plain decoding does not, however few drafts are verified: below the
    first budget the slope of the first two goes on, not the line to plain decoding.
    """
    if len(budgets) > 2:
        slope = (verify[2] - verify[1]) / (budgets[2] - budgets[1])
        first = max(verify[0], verify[1] - slope * budgets[1])
    else:
        first = verify[0]
    last = (verify[-1] - verify[-2]) / (budgets[-1] - budgets[-2])
    nodes = 1.0 + np.concatenate([budgets, [budgets[-1] + _FAR]])
    return nodes, np.concatenate([[first], verify[1:], [verify[-1] + last * _FAR]])


def _extended(budget: int | NDArray[np.int64], budgets: Floats, times: Floats) -> Floats:
    """Draft time at any budget; beyond the last one its last slope goes on."""
    slope = (times[-1] - times[-2]) / (budgets[-1] - budgets[-2])
    beyond = np.maximum(np.asarray(budget) - budgets[-1], 0.0)
    extended: Floats = np.interp(budget, budgets, times) + slope * beyond
    return extended
