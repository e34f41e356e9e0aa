"""The slo policy: of the choices that meet a latency target, the one with the best goodput."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specstack.budget.base import Load
from specstack.budget.goodput import GoodputPolicy

Floats = NDArray[np.float64]


class SloPolicy(GoodputPolicy):
    """Goodput under targets; where no choice meets them, the one that misses them least.

    A request that emits one token per round waits a whole round for it. So the time per output
    token is (time of a round) / (expected tokens of the request that gets fewest): 1 as soon as a
    request does not draft. While requests queue, a round also delays their first token.
    """

    def __init__(
        self,
        choices: Sequence[int],
        tpot_ms: float | None = None,
        ttft_ms: float | None = None,
        prices: bool = True,
        dwell_rounds: int = 8,
        hysteresis: float = 0.03,
        max_context: int | None = None,
        costs: str = "auto",
    ) -> None:
        """Take the targets in milliseconds, at least one; the others are goodput's.

        Args:
            tpot_ms: most time per output token of any request of the batch, on average.
            ttft_ms: most time of a round while requests wait for their first token.
        """
        super().__init__(choices, prices, dwell_rounds, hysteresis, max_context, costs)
        if tpot_ms is None and ttft_ms is None:
            raise ValueError("give tpot_ms, ttft_ms or both")
        for name, target in (("tpot_ms", tpot_ms), ("ttft_ms", ttft_ms)):
            if target is not None and target <= 0:
                raise ValueError(f"{name} must be above 0, got {target}")
        self._tpot_ms = tpot_ms
        self._ttft_ms = ttft_ms

    def _excess(
        self, load: Load, drafting: int, milliseconds: Floats, emitted: Floats
    ) -> Floats | None:
        """The worse one of (predicted / target) per choice [C, L]."""
        excess = np.zeros_like(milliseconds)
        if self._tpot_ms is not None:
            fewest = np.ones_like(emitted)
            if drafting == load.num_running:
                factors = self._runtime.survivals.requests.factors(load.request_ids)
                slowest = min(1.0, float(factors.min())) if len(factors) else 1.0
                fewest = 1 + slowest * (emitted - 1)
            excess = milliseconds / (fewest * self._tpot_ms)
        if self._ttft_ms is not None and load.num_queued > 0:
            excess = np.maximum(excess, milliseconds / self._ttft_ms)
        return excess
