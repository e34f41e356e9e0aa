"""The contract of a budget policy: how many drafts a round may verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """What the engine is doing when a round starts."""

    num_running: int
    """Requests in the batch."""


@dataclass(frozen=True)
class Budget:
    """Drafts per request for one round, and why."""

    draft_budget: int
    """Nodes per request, root excluded; 0 = plain decoding."""
    reason: str
    """Short, machine-readable, of bounded cardinality."""
    min_survival: float = 0.0
    """Price of a node: drafts whose path is less likely than this to be accepted are not
    verified, however much of the budget is left."""


class BudgetPolicy(Protocol):
    """Decides once a round, on the host, from the load alone: equal on every rank."""

    def next(self, load: Load) -> Budget:
        """Return the budget of the coming round."""
