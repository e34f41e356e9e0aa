"""What drafts are worth and which are correct, by request and place: the same for every policy.

Letters: B requests of a round, W drafts per request at most, K longest accepted path, D depths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specstack.simulation.errors import SimulationError
from specstack.simulation.workload import Floats, Ints

STEADINESS = 6.0
"""Concentration of the Beta law of requests' difficulty, and of that of rounds around it."""
_GRID = 4096
"""Steps of the uniform that says which node of a depth is the correct one."""


@dataclass(frozen=True)
class Drafts:
    """What the drafter offers in one round, and what the target would say to it."""

    survivals: NDArray[np.float32]
    """[B, W]: as the drafter calibrates them, falling."""
    chances: Floats
    """[B, W]: as they are."""
    ranks: Ints
    """[B, K]: places of the correct drafts, counted from 1, rising; 0 pads."""


class Acceptance(Protocol):
    """A source of drafts."""

    name: str

    def drafts(self, requests: Ints, emitted: Ints, num_drafted: Ints) -> Drafts:
        """Return the drafts of a round.

        Args:
            requests: [B] of the workload.
            emitted: [B] tokens of each so far.
            num_drafted: [B] rounds in which each drafted so far.
        """


@dataclass(frozen=True)
class AcceptCurve:
    """Mean accept length by budget, the bonus token included."""

    points: tuple[tuple[int, float], ...]
    """(budget, accept length), rising from (at least 1, above 1)."""

    def survivals(self, width: int) -> Floats:
        """Mean survival by rank [W], whose sums up to each point give the curve.

        Between points, before the first and beyond the last, accept length - 1 is a power of the
        budget.

        Raises:
            SimulationError: the accept lengths do not rise, or rise faster and faster.
        """
        budgets, lengths = np.array(self.points, dtype=np.float64).T
        if (np.diff(budgets, prepend=0) <= 0).any() or (np.diff(lengths, prepend=1) <= 0).any():
            raise SimulationError(
                f"the accept curve {self.points} must rise, from above 1 at a budget of 1 or more"
            )
        x, y = np.log(budgets), np.log(lengths - 1)
        if len(x) == 1:
            x, y = np.append(x, x[0] + 1), np.append(y, y[0] + 0.5)
        slopes = np.diff(y) / np.diff(x)
        at = np.log(np.arange(1, width + 1))
        piece = np.clip(np.searchsorted(x, at) - 1, 0, len(slopes) - 1)
        steps = np.diff(np.exp(y[piece] + slopes[piece] * (at - x[piece])), prepend=0.0)
        falling = np.minimum.accumulate(steps)
        if falling.sum() < 0.98 * steps.sum() or falling[0] >= 1:
            raise SimulationError(
                f"the accept curve {self.points} rises faster and faster: the second draft of a"
                " round cannot be worth more than the first, nor the first more than one token"
            )
        return falling


def _depths(means: Floats) -> tuple[Ints, Floats]:
    """Put ranks into depths: [W] depth of each, and [D] chance that one of a depth is correct.

    Each rank goes to the first depth that has room, where room shrinks from depth to depth by one
    factor, chosen such that all ranks find some.
    """
    ratios = np.linspace(max(0.4, means[0]), 0.99, 200)
    room = ratios[:, None] ** np.arange(1, 17)
    enough = np.flatnonzero(room.sum(axis=1) >= 1.2 * means.sum())
    limits = room[enough[0] if enough.size else -1]
    places, chances = np.zeros(len(means), dtype=np.int64), [0.0] * len(limits)
    for rank, mean in enumerate(means.tolist()):
        fits = (d for d, limit in enumerate(limits) if chances[d] + mean <= limit + 1e-12)
        place = next(fits, None)
        if place is None:
            place = len(chances)
            chances.append(0.0)
        places[rank] = place
        chances[place] += mean
    order = sorted((d for d, chance in enumerate(chances) if chance > 0), key=lambda d: -chances[d])
    index = np.zeros(len(chances), dtype=np.int64)
    index[order] = np.arange(len(order))
    return index[places], np.array(chances)[order]


class SyntheticAcceptance:
    """Drafts whose mean accept length follows a curve.

    A request draws its difficulty from a Beta law, every place of its answer again one around it;
    it scales all survivals of the round. One uniform says how deep the correct path is, another
    which node of each depth it takes: every draft is correct with exactly its survival. That a
    correct draft's parent is correct too holds along depths, not for named nodes.
    """

    def __init__(
        self, curve: AcceptCurve, width: int, output_lens: Ints, seed: int, optimism: float = 1.0
    ) -> None:
        """Draw everything that is random, for every request and every token of its answer.

        Args:
            width: most drafts of a round.
            output_lens: tokens of each answer [N].
            optimism: the drafter says s ** (1 / optimism) of a draft that survives with s.
        """
        self.name = f"accept lengths {dict(curve.points)}"
        means = curve.survivals(width)
        places, depth_chances = _depths(means)
        self._scale = 1.0 / depth_chances[0]
        self._means, self._depth_chances, self._optimism = means, depth_chances, optimism
        self._ranks = _ranks_by_uniform(means, places, len(depth_chances))
        self._starts = np.concatenate([[0], np.cumsum(output_lens)])
        self._draw(output_lens, min(float(depth_chances[0]), 0.98), seed)

    def _draw(self, output_lens: Ints, mean: float, seed: int) -> None:
        total = int(self._starts[-1])
        self._levels = np.empty(total)
        self._depth_uniforms = np.empty(total)
        self._node_uniforms = np.empty(total, dtype=np.int64)
        for request, length in enumerate(output_lens.tolist()):
            random = np.random.default_rng([seed, 3, request])
            own = np.clip(random.beta(mean * STEADINESS, (1 - mean) * STEADINESS), 0.001, 0.999)
            here = slice(self._starts[request], self._starts[request + 1])
            self._levels[here] = random.beta(own * STEADINESS, (1 - own) * STEADINESS, length)
            self._depth_uniforms[here] = random.random(length)
            self._node_uniforms[here] = random.integers(0, _GRID, length)

    def drafts(self, requests: Ints, emitted: Ints, num_drafted: Ints) -> Drafts:
        """Return the drafts of a round; `num_drafted` does not matter."""
        at = self._starts[requests] + emitted
        factors = (self._levels[at] * self._scale)[:, None]
        chances = factors * self._means
        reached = factors * self._depth_chances > self._depth_uniforms[at][:, None]
        ranks = np.where(reached, self._ranks[self._node_uniforms[at]], 0)
        ranks.sort(axis=1)
        told = chances if self._optimism == 1.0 else chances ** (1.0 / self._optimism)
        return Drafts(told.astype(np.float32), chances, ranks)


def _ranks_by_uniform(means: Floats, places: Ints, num_depths: int) -> Ints:
    """[_GRID, D]: which rank of each depth is the correct one, by a uniform."""
    uniforms = (np.arange(_GRID) + 0.5) / _GRID
    table = np.empty((_GRID, num_depths), dtype=np.int64)
    for depth in range(num_depths):
        ranks = np.flatnonzero(places == depth)
        shares = np.cumsum(means[ranks]) / means[ranks].sum()
        table[:, depth] = ranks[np.minimum(np.searchsorted(shares, uniforms), len(ranks) - 1)] + 1
    return table
