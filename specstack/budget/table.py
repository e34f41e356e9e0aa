"""The table policy: a budget per batch size, as large batches leave no idle compute to spend.

A row holds for batches of up to `max_batch` requests; larger batches than the last row's decode
plainly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from specstack.budget.base import Budget, Load, LoadPolicy


class TablePolicy(LoadPolicy):
    """Looks the number of running requests up in a table."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows with `max_batch` (rising), `draft_budget` and, if wanted, `min_survival`."""
        if not rows:
            raise ValueError("a budget table needs at least one row")
        self._max_batches = [row["max_batch"] for row in rows]
        if any(a >= b for a, b in zip([0, *self._max_batches], self._max_batches, strict=False)):
            raise ValueError(f"max_batch must rise from row to row, got {self._max_batches}")
        if any(row["draft_budget"] < 0 for row in rows):
            raise ValueError("draft_budget must be at least 0 in every row")
        self._budgets = [
            Budget(row["draft_budget"], f"batch<={row['max_batch']}", row.get("min_survival", 0.0))
            for row in rows
        ]
        self._beyond = Budget(0, f"batch>{self._max_batches[-1]}")

    def next(self, load: Load) -> Budget:
        """Return the budget of the first row that the batch fits into."""
        row = bisect_left(self._max_batches, load.num_running)
        return self._budgets[row] if row < len(self._budgets) else self._beyond
