"""When something that was turned off is tried again, and which requests of a batch may draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specstack.budget.base import Load
from specstack.budget.request_factors import RequestFactors

FIRST_WAIT = 32
"""Rounds from turning drafting off to the first probe."""
LONGEST_WAIT = 1024
MARGIN = 0.5
"""Share of the price that a request's drafts of a rank must be worth on average: in single rounds
they are worth more, and the price itself sees that."""
REFRESH = 8
"""Rounds between two comparisons of the same requests."""
REQUEST_WAIT = 64
"""Rounds of a request that its failing drafts are left out for between two tries."""


class Probes:
    """Probes after 32, 64, ... 1024 rounds: what keeps failing is tried ever less often.

    One probe is a round. While probes pay, the next one follows at once.
    """

    def __init__(self, first: int = FIRST_WAIT, longest: int = LONGEST_WAIT) -> None:
        if not 1 <= first <= longest:
            raise ValueError(f"probes need 1 <= first <= longest, got {first} and {longest}")
        self._first, self._longest = first, longest
        self.reset()

    def reset(self) -> None:
        """Start anew: drafting was turned off just now, or is on."""
        self.wait = self._first
        self._rounds = 0
        self._at_once = False

    def due(self) -> bool:
        """Count a round that is off; True: let it draft."""
        self._rounds += 1
        if not self._at_once and self._rounds < self.wait:
            return False
        if not self._at_once:
            self.wait = min(2 * self.wait, self._longest)
        self._rounds, self._at_once = 0, False
        return True

    def paid(self) -> None:
        """The last probe was worth it: the next round is a probe as well."""
        self._at_once, self.wait = True, self._first


class RequestGates:
    """Budgets of single requests: none beyond a context, few where drafts fail.

    A request's drafts are worth what the average request's are, times its factor. It gets the
    ranks that are worth half the price. One that gets none is tried again every 64 of its rounds.
    """

    def __init__(self, max_context: int | None = None) -> None:
        if max_context is not None and max_context < 1:
            raise ValueError(f"max_context must be at least 1, got {max_context}")
        self.max_context = max_context
        self._waited: dict[str, int] = {}
        self._asked: tuple[tuple[str, ...], int] | None = None
        self._age = 0  # rounds since requests were compared
        self._wanted: list[int] | None = None

    def within(self, load: Load) -> tuple[bool, ...] | None:
        """Which requests may draft by their own wish and context [B]; None: all of them."""
        wants = None if all(load.speculating) else load.speculating
        most = self.max_context
        if most is None or not load.context_lens or max(load.context_lens) <= most:
            return wants
        wants = wants or (True,) * load.num_running
        return tuple(
            want and length <= most for want, length in zip(wants, load.context_lens, strict=True)
        )

    def budgets(
        self,
        load: Load,
        within: tuple[bool, ...] | None,
        draft_budget: int,
        price: float,
        curve: NDArray[np.float64],
        factors: RequestFactors,
    ) -> tuple[int, ...] | None:
        """Return the budget of each request [B], None: all get `draft_budget`.

        Args:
            within: what `within` returns [B]; None: all may draft.
            price: what a draft must be worth; 0 leaves out no failing request.
            curve: mean survival by rank, falling [W].
        """
        may_draft = within or (True,) * load.num_running
        if price <= 0 or not load.request_ids or not len(curve):
            return None if within is None else tuple(draft_budget * may for may in may_draft)
        self._age += 1
        asked = load.request_ids, draft_budget
        if asked != self._asked or self._age >= REFRESH:
            self._asked, self._age = asked, 0
            found = factors.factors(load.request_ids)
            self._wanted = _worth(found, draft_budget, MARGIN * price, curve)
        if self._wanted is None:
            self._waited.clear()
            return None if within is None else tuple(draft_budget * may for may in may_draft)
        tried = self._retried(load.request_ids, self._wanted, draft_budget)
        limits = tuple(budget * may for budget, may in zip(tried, may_draft, strict=True))
        if any(limits):
            return limits
        # Nobody's drafts are worth the price on average: then the price alone decides.
        return None if within is None else tuple(draft_budget * may for may in may_draft)

    def _retried(
        self, request_ids: Sequence[str], wanted: list[int], draft_budget: int
    ) -> list[int]:
        """Let requests that get nothing draft now and then."""
        waited = {
            name: self._waited.get(name, 0) + 1
            for name, budget in zip(request_ids, wanted, strict=True)
            if not budget
        }
        tried = list(wanted)
        for row, name in enumerate(request_ids):
            if waited.get(name) == REQUEST_WAIT:
                tried[row], waited[name] = draft_budget, 0
        self._waited = waited
        return tried


def _worth(
    found: NDArray[np.float64], draft_budget: int, least: float, curve: NDArray[np.float64]
) -> list[int] | None:
    """Ranks that are worth `least`, per request with the factor `found`; None: all, for all."""
    reach = curve[: min(draft_budget, len(curve))]
    if not (found * reach[-1] < least).any():
        return None
    worth = np.searchsorted(-reach, -least / found, side="right")
    worth[found >= 1.0] = draft_budget  # the price leaves out what is not worth it
    made: list[int] = np.minimum(worth, draft_budget).tolist()
    return made
