"""How requests differ from the average: what each accepted over what was to be expected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PRIOR = 8.0
"""Expected correct drafts that a factor of 1 is worth."""
HALF_LIFE = 64.0
"""Rounds of a request over which what it did halves in weight."""
KEPT = 1024
"""Requests are forgotten this many rounds after their last one; they are looked for as often."""

_KEEP = 0.5 ** (1.0 / HALF_LIFE)


class RequestFactors:
    """One factor per request id, 1 for ids that were never seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float, int]] = {}
        self._round = 0
        self._factors: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def observe(
        self,
        request_ids: Sequence[str],
        predicted: NDArray[np.float64],
        realised: NDArray[np.int64],
    ) -> None:
        """Add a round: correct drafts that were predicted and realised, per request [B]."""
        self._round += 1
        rows = zip(request_ids, predicted.tolist(), realised.tolist(), strict=False)
        for name, expected, correct in rows:
            before = self._seen.get(name)
            if before is not None:
                expected += before[0] * _KEEP
                correct += before[1] * _KEEP
            self._seen[name] = expected, correct, self._round
            self._factors[name] = (PRIOR + correct) / (PRIOR + expected)
        if self._round % KEPT == 0:
            self._forget()

    def _forget(self) -> None:
        oldest = self._round - KEPT
        for name in [n for n, (_, _, last) in self._seen.items() if last <= oldest]:
            del self._seen[name], self._factors[name]

    def factors(self, request_ids: Sequence[str]) -> NDArray[np.float64]:
        """The factors of requests [B]."""
        get = self._factors.get
        return np.array([get(name, 1.0) for name in request_ids])
