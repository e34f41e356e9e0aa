"""Acceptance lately, for people: per depth, per context length. Decayed by rounds.

alpha_k is the chance that the draft at depth k of the accepted path is correct, given that depth
k - 1 was. Metrics count for ever and leave the window to the query; this is for a status page.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specstack.metrics.definitions import CONTEXT_BUCKETS, context_bucket
from specstack.metrics.record import RoundRecord

HALF_LIFE_ROUNDS = 500
_RESCALE = 2.0**40


class RecentAcceptance:
    """Sums over rounds whose weight halves every `HALF_LIFE_ROUNDS`."""

    def __init__(self) -> None:
        self._weight = 1.0
        """Of the coming round; grows, so that older rounds weigh less beside it."""
        self._reached = np.zeros(1)
        """By depth, root first: drafting requests whose accepted path got there."""
        self._contexts = np.zeros((len(CONTEXT_BUCKETS), 3))
        """Drafting requests, their verified drafts, their correct drafts."""

    def observe(self, record: RoundRecord) -> None:
        """Add the requests of a round that drafted."""
        if record.num_drafting == 0:
            return
        self._weight *= 2 ** (1 / HALF_LIFE_ROUNDS)
        drafts = np.asarray(record.counted_drafts)
        correct = np.asarray(record.num_correct)[drafts > 0]
        counts = np.bincount(correct)
        reached = counts[::-1].cumsum()[::-1] * self._weight
        if len(reached) > len(self._reached):
            self._reached = np.pad(self._reached, (0, len(reached) - len(self._reached)))
        self._reached[: len(reached)] += reached
        for context, num_drafts, num_correct in zip(
            record.context_lens, record.counted_drafts, record.num_correct, strict=False
        ):
            if num_drafts:
                row = self._contexts[CONTEXT_BUCKETS.index(context_bucket(context))]
                row += self._weight * np.array([1, num_drafts, num_correct])
        if self._weight > _RESCALE:
            self._reached /= self._weight
            self._contexts /= self._weight
            self._weight = 1.0

    @property
    def state(self) -> dict[str, Any]:
        """JSON: accept length (bonus included), alpha_k from k = 1 on, buckets with traffic."""
        requests = self._reached[0]
        if requests == 0:
            return {"accept_length": None, "alpha": [], "contexts": {}}
        reached = self._reached[self._reached > 0]
        return {
            "accept_length": round(float(1 + self._reached[1:].sum() / requests), 4),
            "alpha": [round(float(a), 4) for a in reached[1:] / reached[:-1]],
            "contexts": {
                bucket: {
                    "accept_length": round(float(1 + correct / rounds), 4),
                    "accept_rate": round(float(correct / drafts), 4),
                }
                for bucket, (rounds, drafts, correct) in zip(
                    CONTEXT_BUCKETS, self._contexts, strict=True
                )
                if rounds > 0
            },
        }
