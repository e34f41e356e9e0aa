"""The oracle: is told what the coming round's drafts are worth. For replays of recorded rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specstack.budget.base import Budget, BudgetRuntime, Load
from specstack.budget.survival import gains
from specstack.metrics.record import RoundRecord


class OraclePolicy:
    """Takes the best budget and price for exactly the drafts of the coming round.

    By expected tokens over predicted time, it is the upper bound of all policies that decide one
    budget and one price per round: it knows what they estimate and never waits.
    """

    def __init__(self, choices: Sequence[int], prices: bool = True) -> None:
        """Take the budgets, rising from 0, and whether it may set a price."""
        if not choices or choices[0] != 0 or any(a >= b for a, b in pairwise(choices)):
            raise ValueError(f"choices must rise from 0, got {list(choices)}")
        self._choices = np.asarray(choices, dtype=np.int64)
        self._prices = prices
        self._survivals: NDArray[np.float64] | None = None

    def attach(self, runtime: BudgetRuntime) -> None:
        """Take costs and the grid of prices."""
        self._runtime = runtime
        count = len(runtime.survivals.prices) if self._prices and runtime.ragged else 1
        self._grid = runtime.survivals.prices[:count]

    def foresee(self, survivals: NDArray[np.floating[Any]]) -> None:
        """Tell what the drafts of the coming round are worth [B, S]; before every `next`.

        Rows are the requests of the load, those that do not draft being 0.
        """
        self._survivals = np.asarray(survivals, dtype=np.float64)

    def next(self, load: Load) -> Budget:
        """Return the best budget; raises RuntimeError where nothing was foretold."""
        if self._survivals is None:
            raise RuntimeError("an oracle decides about what it foresees: call foresee() first")
        survivals, self._survivals = self._survivals, None
        if load.num_speculating == 0:
            return Budget(0, "idle")
        running = load.num_running
        correct, drafts = gains(survivals, self._choices, self._grid)
        if self._runtime.ragged:
            width = 1 + drafts / running
        else:
            width = np.broadcast_to(1.0 + self._choices[:, None], correct.shape)
        costs = self._runtime.costs
        milliseconds = costs.step_ms(running, load.mean_context, self._choices, width)
        goodputs = (running + correct) / milliseconds
        row, column = divmod(int(goodputs.argmax()), goodputs.shape[1])
        reason = "goodput" if row else "off"
        return Budget(int(self._choices[row]), reason, float(self._grid[column]))

    def observe(self, record: RoundRecord) -> None:
        """Nothing is learned: everything is known."""

    @property
    def state(self) -> Mapping[str, Any]:
        """Nothing is remembered."""
        return {}
