"""What drafts were worth lately: the tokens that a budget and a price would have given.

A round's record holds, per request, the probability that the target accepts each offered draft,
best first. From one round at any budget follows what every budget and price would have given:
E[tokens | budget W, price l] = 1 + the sum of the first W survivals that are at least l. The
window keeps decayed means of that, and corrects them by what was accepted in fact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specstack.budget.request_factors import RequestFactors
from specstack.metrics.record import RoundRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""The prices that policies choose from."""
FLOOR = 64.0
"""Request-rounds that plain decoding never ages the window below: what is known stays known, but
a few probes outweigh it."""
AGEING = 0.25
"""A round that decoded plainly ages the window by this share of a round that drafted."""
PRIOR = 1.0
"""Expected correct drafts that a correction of 1 is worth, per bucket of ranks: few, as deep ranks
are seldom correct."""
REFRESH = 16
"""Rounds between two looks at what ranks are worth on average, for the factors of requests."""
TAIL_COLUMNS = 4
"""Last known columns that the ratio of the geometric tail is fitted to."""


def gains(survivals: Floats, budgets: Ints, prices: Floats) -> tuple[Floats, Floats]:
    """Return what rounds over these drafts give at every budget and price, summed over requests.

    Args:
        survivals: [B, S], falling in each row, 0 where nothing was offered.
        budgets: [C].
        prices: [L].

    Returns:
        [C, L] expected correct drafts (without the bonus tokens), and [C, L] drafts verified.
        Beyond the S drafts offered a budget gives nothing more.
    """
    num_drafts = survivals.shape[1]
    at = np.minimum(budgets, num_drafts)
    worth = _worth(survivals, prices)
    drafts = np.zeros((num_drafts + 1, len(prices)))
    correct = np.zeros_like(drafts)
    np.cumsum(worth.sum(axis=0), axis=0, out=drafts[1:])
    np.cumsum((survivals[:, :, None] * worth).sum(axis=0), axis=0, out=correct[1:])
    return correct[at], drafts[at]


def _worth(survivals: Floats, prices: Floats) -> Floats:
    """Whether a draft is verified at a price: [B, S, L] of 0 and 1."""
    least = np.maximum(prices, np.finfo(np.float64).tiny)  # nothing was offered where it is 0
    return (survivals[:, :, None] >= least).astype(np.float64)


class SurvivalWindow:
    """Decayed means over recent request-rounds of drafting requests.

    A request-round is one request in one round that was asked to draft; one whose drafter had
    nothing to offer counts as one token and no draft. All numbers halve in weight over `half_life`
    request-rounds, so that a batch of 16 forgets as much per token as a single request does.

    Budgets beyond what a round offered are extrapolated, in rows whose drafter gave all that it
    was asked for: with the shape that larger rounds had, and beyond all of these with a geometric
    tail. The tail is never above the last survival seen, and 0 only where larger rounds
    offered nothing. A row that ends early is taken at its word.
    """

    def __init__(
        self, budgets: Sequence[int], prices: Sequence[float] = PRICES, half_life: float = 256.0
    ) -> None:
        """Take budgets rising from 0 and prices rising from 0; raises ValueError."""
        self.budgets: Ints = np.asarray(budgets, dtype=np.int64)
        self.prices: Floats = np.asarray(prices, dtype=np.float64)
        for name, axis in (("budgets", self.budgets), ("prices", self.prices)):
            if not len(axis) or axis[0] != 0 or np.any(np.diff(axis) <= 0):
                raise ValueError(f"{name} must rise from 0, got {axis.tolist()}")
        if half_life <= 0:
            raise ValueError(f"half_life must be above 0, got {half_life}")
        self.half_life = half_life
        self.requests = RequestFactors()
        self._most = int(self.budgets[-1])
        num_choices = len(self.budgets), len(self.prices)
        self._asked = 0.0
        self._correct = np.zeros((self._most, num_choices[1]))
        self._verified = np.zeros((self._most, num_choices[1]))
        self._offers = np.zeros(self._most)
        self._curve = np.zeros(self._most)
        # By survival, between one price and the next: what a price leaves out is told apart from
        # what it keeps. One factor for all would make high prices look better than they are.
        self._predicted = np.zeros(num_choices[1])
        self._realised = np.zeros(num_choices[1])
        self._reach = np.zeros(self._most + 1)  # mean correct drafts among the first so many
        self._num_rounds = 0
        self._expected: tuple[Floats, Floats] | None = None
        self._mean_curve: Floats | None = None

    @property
    def num_observed(self) -> float:
        """Request-rounds that the means rest on, decayed."""
        return self._asked

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round, whoever chose its budget."""
        if record.draft_budget == 0 or not self._most:
            if self._asked > FLOOR:
                self._age(AGEING * record.num_requests, FLOOR)
            return
        asked = record.num_asked
        rows = np.asarray(record.survivals, dtype=np.float64)
        offered = np.flatnonzero(rows.any(axis=1))
        self._age(asked, 0.0)
        self._asked += asked
        if not len(offered):
            return
        rows = _columns(rows[offered], min(record.draft_budget, self._most))
        verified = np.asarray(record.num_drafts, dtype=np.int64)[offered]
        ranks = record.accept_ranks[offered]
        ranks = np.where(ranks <= self._most, ranks, 0)
        self._learn_curve(rows)
        self._learn_outcomes(rows, verified, ranks)
        full = self._extended(rows)
        worth = _worth(full, self.prices)
        self._verified += worth.sum(axis=0)
        self._correct += (full[:, :, None] * worth).sum(axis=0)
        if self._num_rounds % REFRESH == 0:
            np.cumsum(self.curve, out=self._reach[1:])
        self._num_rounds += 1
        if record.request_ids:
            ids = [record.request_ids[row] for row in offered.tolist()]
            predicted = self._reach[np.minimum(verified, self._most)]
            self.requests.observe(ids, predicted, np.count_nonzero(ranks, axis=1))

    def _age(self, request_rounds: float, floor: float) -> None:
        keep = 0.5 ** (request_rounds / self.half_life)
        if self._asked * keep < floor:
            keep = floor / self._asked
        self._asked *= keep
        for sums in (self._correct, self._verified, self._predicted, self._realised):
            sums *= keep
        self._expected = self._mean_curve = None

    def _learn_outcomes(self, rows: Floats, verified: Ints, ranks: Ints) -> None:
        """Compare what was predicted of the verified drafts with what was accepted.

        Drafts below the price, or beyond a request's own budget, have no outcome.
        """
        width, num_bins = rows.shape[1], len(self.prices)
        seen = np.arange(width) < verified[:, None]
        bins = self._bins(rows)
        self._predicted += np.bincount(bins[seen], rows[seen], minlength=num_bins)
        row, place = np.nonzero((ranks > 0) & (ranks <= width))
        self._realised += np.bincount(bins[row, ranks[row, place] - 1], minlength=num_bins)

    def _bins(self, survivals: Floats) -> Ints:
        """Index of the highest price that each survival is worth."""
        return np.searchsorted(self.prices, survivals, side="right") - 1

    def _learn_curve(self, rows: Floats) -> None:
        """The mean survival by rank of the rows that hold drafts; columns age when seen."""
        count, width = rows.shape
        keep = 0.5 ** (count / self.half_life)
        self._offers[:width] = keep * self._offers[:width] + count
        self._curve[:width] = keep * self._curve[:width] + rows.sum(axis=0)

    def _extended(self, rows: Floats) -> Floats:
        """Rows [B, S] continued to the largest budget [B, W]."""
        width = rows.shape[1]
        if width == self._most:
            return rows
        shape = self._raw_curve()
        last = shape[width - 1]
        tail = np.minimum(shape[width:] / last, 1.0) if last > 0 else shape[width:]
        return np.concatenate([rows, rows[:, -1:] * tail], axis=1)

    def _raw_curve(self) -> Floats:
        """Mean survival by rank [W], falling; beyond the columns that were seen, the tail."""
        known = int(np.count_nonzero(self._offers))
        if not known:
            return np.zeros(self._most)
        curve = np.minimum.accumulate(self._curve[:known] / self._offers[:known])
        first = max(0, known - 1 - TAIL_COLUMNS)
        ratio = float(curve[0])  # of one column alone: a chain of drafts as good as the first
        if curve[-1] == 0:  # no drafter had so many to offer
            ratio = 0.0
        elif known > 1:
            ratio = float((curve[-1] / curve[first]) ** (1.0 / (known - 1 - first)))
        tail = curve[-1] * ratio ** np.arange(1, self._most - known + 1)
        return np.concatenate([curve, tail])

    def _factors(self) -> Floats:
        """Realised / predicted of survivals between one price and the next [L].

        Shrunk towards that of all together, which is shrunk towards 1: what a price leaves out has
        no outcomes, and would look better from day to day.
        """
        every = (PRIOR + self._realised.sum()) / (PRIOR + self._predicted.sum())
        factors: Floats = (PRIOR * every + self._realised) / (PRIOR + self._predicted)
        return factors

    @property
    def curve(self) -> Floats:
        """Corrected mean survival by rank, of requests whose drafter had drafts to offer [W]."""
        if self._mean_curve is None:
            raw = self._raw_curve()
            corrected = np.minimum(raw * self._factors()[self._bins(raw)], 1.0)
            self._mean_curve = np.minimum.accumulate(corrected)
        return self._mean_curve

    def expected(self) -> tuple[Floats, Floats]:
        """Return tokens emitted [C, L] and drafts verified [C, L] per drafting request-round.

        Row 0, plain decoding, is (1, 0); before anything was observed every row is.
        """
        if self._expected is None:
            shape = len(self.budgets), len(self.prices)
            emitted, verified = np.ones(shape), np.zeros(shape)
            if self._asked and self._most:
                correct = np.minimum(_between(self._correct) * self._factors(),
                                     _between(self._verified))  # fmt: skip
                correct = correct[:, ::-1].cumsum(axis=1)[:, ::-1]
                rows = self.budgets[1:] - 1
                emitted[1:] += np.cumsum(correct, axis=0)[rows] / self._asked
                verified[1:] = np.cumsum(self._verified, axis=0)[rows] / self._asked
            self._expected = emitted, verified
        return self._expected

    @property
    def state(self) -> Mapping[str, Any]:
        """Means and corrections, for people."""
        emitted, _ = self.expected()
        means = zip(self.budgets.tolist(), emitted[:, 0].tolist(), strict=True)
        return {
            "request_rounds": round(self._asked, 1),
            "accept_length": {str(budget): round(mean, 3) for budget, mean in means},
            "corrections": {
                f"{price:g}": round(float(factor), 3)
                for price, factor in zip(self.prices, self._factors(), strict=True)
            },
            "num_requests": len(self.requests),
        }


def _columns(rows: Floats, width: int) -> Floats:
    """Rows of `width` columns: cut, or padded with 0 where no drafter had more to offer."""
    missing = width - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing))) if missing > 0 else rows[:, :width]


def _between(sums: Floats) -> Floats:
    """Of what is worth each price [.., L], what is not worth the next one."""
    return sums - np.pad(sums[:, 1:], ((0, 0), (0, 1)))
