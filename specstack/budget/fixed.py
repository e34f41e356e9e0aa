"""The fixed policy: the same budget whatever the load."""

from __future__ import annotations

from specstack.budget.base import Budget, Load, LoadPolicy


class FixedPolicy(LoadPolicy):
    """Always answers with one budget."""

    def __init__(self, draft_budget: int, min_survival: float = 0.0) -> None:
        if draft_budget < 0:
            raise ValueError(f"draft_budget must be at least 0, got {draft_budget}")
        self._budget = Budget(draft_budget, "fixed", min_survival)

    def next(self, load: Load) -> Budget:
        """Return the configured budget."""
        return self._budget
