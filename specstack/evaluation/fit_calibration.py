"""From drafts and their places in the tree to the factors of a calibration. No torch.

The factor of a place is how often its drafts were right over how often the drafter said that they
would be. `prior` drafts that were as often right as was said are added to both, so that a place
that was rarely reached keeps its q. Letters: K depths, R ranks, S sequences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specstack.calibration_file import HeldOut
from specstack.evaluation.known_texts import KnownText
from specstack.evaluation.tallies import Bools, Floats, Ints, Places

SURE = 1e-6
"""A q nearer to 0 or 1 counts as this: one mistake must not decide a mean of logarithms."""


@dataclass(frozen=True)
class PlaceCounts:
    """[K, R, 2] each: what continues off the spine, and on it."""

    reached: Ints
    right: Ints
    sum_q: Floats

    @classmethod
    def of(cls, places: Places, num_depths: int, num_ranks: int) -> PlaceCounts:
        """Count drafts; those that stand deeper or lower count for the last depth or rank."""
        size = (num_depths, num_ranks, 2)
        index = _index(places, size)

        def sums(values: NDArray[np.generic] | float) -> Floats:
            found = np.zeros(size)
            np.add.at(found, index, values)
            return found

        q = np.exp(places.log_q.astype(np.float64))
        return cls(sums(1.0).astype(np.int64), sums(places.is_right).astype(np.int64), sums(q))


def fit(counts: PlaceCounts, prior: float) -> Floats:
    """Return log factors, [K, R, 2]; `prior` is above 0."""
    found: Floats = np.log((counts.right + prior) / (counts.sum_q + prior))
    return found


def log_loss(places: Places, log_factor: Floats) -> float:
    """Mean over drafts of -log of the probability that was given to what happened."""
    log_q = places.log_q + log_factor[_index(places, log_factor.shape)]
    q = np.exp(log_q).clip(SURE, 1 - SURE)
    return float(-np.log(np.where(places.is_right, q, 1 - q)).mean())


def held_out(
    places: Places, texts: Sequence[KnownText], size: tuple[int, int], prior: float
) -> HeldOut | None:
    """Fit on one half of the texts, judge on the other; None where one of them has no drafts.

    Args:
        size: depths and ranks.
    """
    fitted_on = first_half(texts)[places.sequence]
    known, unknown = places.where(fitted_on), places.where(~fitted_on)
    if not len(known) or not len(unknown):
        return None
    log_factor = fit(PlaceCounts.of(known, *size), prior)
    return HeldOut(
        fitted_drafts=len(known),
        drafts=len(unknown),
        log_loss_before=log_loss(unknown, np.zeros_like(log_factor)),
        log_loss_after=log_loss(unknown, log_factor),
    )


def first_half(texts: Sequence[KnownText]) -> Bools:
    """Return [S]: every other prompt by its hash, so that answers to one prompt stay together."""
    keys = [hashlib.sha256(repr(text.prompt).encode()).digest() for text in texts]
    place = {key: number for number, key in enumerate(sorted(set(keys)))}
    return np.array([place[key] % 2 == 0 for key in keys])


def _index(places: Places, size: tuple[int, ...]) -> tuple[NDArray[np.integer], ...]:
    depth, rank = (
        np.minimum(values, limit - 1)
        for values, limit in ((places.depth - 1, size[0]), (places.rank, size[1]))
    )
    return depth, rank, places.continues_spine.astype(np.int64)
