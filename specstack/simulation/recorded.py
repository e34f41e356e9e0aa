"""Acceptance from a trace: rounds of a recorded request, in order, again and again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specstack.metrics.record import RoundRecord
from specstack.simulation.acceptance import Drafts
from specstack.simulation.errors import SimulationError
from specstack.simulation.workload import Floats, Ints

MIN_RATIO, MAX_RATIO = 0.3, 0.95
"""Of the geometric tail of a row."""
PRIOR = 8.0
"""Expected correct drafts that a hindsight factor of 1 is worth."""


class RecordedAcceptance:
    """The n-th round in which a request drafts is the n-th recorded round of its counterpart.

    A budget below the recorded one accepts the correct drafts of the ranks that are left. Beyond
    the drafts that were verified nothing is known: survivals go on with the geometric tail of their
    row, and drafts are correct as one uniform per recorded round says. What drafts are really worth
    (`chances`) is their survival times realised / predicted of their rank over the whole trace.
    """

    def __init__(self, records: Iterable[RoundRecord], width: int, seed: int = 0) -> None:
        """Take the rounds of a trace; rounds that drafted nothing say nothing.

        Args:
            width: most drafts of a round.

        Raises:
            SimulationError: no round drafted.
        """
        self.name = "recorded rounds"
        random = np.random.default_rng([seed, 4])
        rows: list[Floats] = []
        ranks: list[list[int]] = []
        known: list[int] = []
        places: dict[str, list[int]] = {}
        for record in records:
            for row in np.flatnonzero(record.survivals.any(axis=1)).tolist():
                places.setdefault(record.request_ids[row], []).append(len(rows))
                survivals = record.survivals[row].astype(np.float64)
                known.append(record.num_drafts[row])
                rows.append(_continued(survivals, width))
                correct = record.accept_ranks[row]
                ranks.append(correct[(correct > 0) & (correct <= width)].tolist())
        if not rows:
            raise SimulationError(
                "the trace has no round that drafted: record one with a budget above 0, or give"
                " --acceptance"
            )
        self._survivals = np.array(rows)
        worth = self._survivals * _hindsight(self._survivals, ranks, known)
        self._chances = np.minimum.accumulate(worth, axis=1)
        self._ranks = _with_drawn(self._chances, ranks, known, random)
        self._sequences = [np.array(of_one) for of_one in places.values()]

    @property
    def num_requests(self) -> int:
        """Recorded requests that drafted."""
        return len(self._sequences)

    def drafts(self, requests: Ints, emitted: Ints, num_drafted: Ints) -> Drafts:
        """Return the drafts of a round; `emitted` does not matter."""
        sequences, at = self._sequences, np.empty(len(requests), dtype=np.int64)
        pairs = zip(requests.tolist(), num_drafted.tolist(), strict=True)
        for row, (request, drafted) in enumerate(pairs):
            sequence = sequences[request % len(sequences)]
            at[row] = sequence[drafted % len(sequence)]
        survivals = self._survivals[at]
        return Drafts(survivals.astype(np.float32), self._chances[at], self._ranks[at])


def _continued(survivals: Floats, width: int) -> Floats:
    """A row [S] as a row [width]: cut, or with the geometric tail of its drafts.

    A row that ends before its S columns do has no more drafts to offer.
    """
    if len(survivals) >= width:
        return survivals[:width]
    row = np.zeros(width)
    row[: len(survivals)] = survivals
    if survivals[-1] > 0:
        steps = max(len(survivals) - 1, 1)
        first = survivals[0] if len(survivals) > 1 else 1.0
        ratio = np.clip((survivals[-1] / first) ** (1 / steps), MIN_RATIO, MAX_RATIO)
        tail = np.arange(1, width - len(survivals) + 1)
        row[len(survivals) :] = survivals[-1] * ratio**tail
    return row


def _hindsight(survivals: Floats, ranks: list[list[int]], known: list[int]) -> Floats:
    """Realised / predicted by rank [width], in buckets of ranks 1, 2, 3-4, 5-8 ..."""
    width = survivals.shape[1]
    seen = np.arange(width) < np.array(known)[:, None]
    buckets = np.ceil(np.log2(np.arange(1, width + 1))).astype(np.int64)
    predicted = np.bincount(buckets, (survivals * seen).sum(axis=0))
    flat = np.array([rank for row in ranks for rank in row], dtype=np.int64)
    realised = np.bincount(buckets[flat - 1], minlength=len(predicted))
    factors = ((PRIOR + realised) / (PRIOR + predicted))[buckets]
    limit: Floats = np.minimum(factors, 1.0 / survivals.max(axis=0).clip(1e-9))
    return limit


def _with_drawn(
    chances: Floats, ranks: list[list[int]], known: list[int], random: np.random.Generator
) -> Ints:
    """[rounds, K]: recorded correct ranks, and drawn ones beyond those that were verified."""
    uniforms = random.random(len(ranks))
    full = []
    for row, correct, verified, uniform in zip(chances, ranks, known, uniforms, strict=True):
        drawn = np.flatnonzero(row[verified:] > uniform) + verified + 1
        full.append([*correct, *drawn.tolist()])
    longest = max(map(len, full))
    return np.array([[0] * (longest - len(row)) + row for row in full], dtype=np.int64)
