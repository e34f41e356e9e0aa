"""What rounds showed, as a table of numpy columns, and the drafts' probabilities beside it.

The counts behind every measure, per sequence, so that a bootstrap can draw sequences. No torch.
Letters: R rounds of single requests, S sequences, K depth, Q bins of probability, M drafters of a
merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Q_EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Bins of the probability that a draft's path is right; the last one holds 1."""


@dataclass(frozen=True)
class Rows:
    """A table, column by column."""

    sequence: Ints

    def __len__(self) -> int:
        return len(self.sequence)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """All rows."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def where(self, keep: Bools) -> Self:
        """Some of the rows."""
        return type(self)(*(getattr(self, field.name)[keep] for field in fields(self)))


@dataclass(frozen=True)
class Rounds(Rows):
    """One row per round of a request."""

    context_len: Ints
    """Tokens before the root."""
    num_right: Ints
    """Right drafts of the accepted path."""
    is_cut: Ints
    """1 where they reach the end of the text: what deeper drafts are worth is not known."""
    num_drafts: Ints
    """Proposed, root excluded."""
    num_emitted: Ints
    drafts_per_drafter: Ints
    """[R, M]: proposed by each; one that several proposed counts for each. 0 without a merge."""
    right_per_drafter: Ints
    """[R, M]: those of the accepted path."""


@dataclass(frozen=True)
class Places(Rows):
    """One row per draft that was put to the test: its parent was right, and the text goes on."""

    depth: NDArray[np.int16]
    """1 for children of the root."""
    rank: NDArray[np.int16]
    """How many of its siblings were more probable."""
    continues_spine: Bools
    """Its parent is the root, or the best guess each time led to it."""
    log_q: NDArray[np.float32]
    """Given its parent."""
    is_right: Bools


@dataclass(frozen=True)
class Counts:
    """Sums over the rounds of each sequence; add them up over sequences."""

    reached: Floats
    """[S, K]: rounds whose path was right up to depth k - 1, and whose text goes on to k."""
    right: Floats
    """[S, K]: those in which depth k was right, too."""
    rounds: Floats
    """[S]"""
    drafts: Floats
    """[S]"""
    correct: Floats
    """[S]: right drafts."""
    emitted: Floats
    """[S]"""
    drafts_per_drafter: Floats
    """[S, M]"""
    correct_per_drafter: Floats
    """[S, M]"""

    def weighted(self, weights: Floats) -> Counts:
        """Sums over sequences, each counted as often as `weights` ([.., S]) says."""
        return Counts(*(weights @ getattr(self, field.name) for field in fields(self)))

    @property
    def total(self) -> Counts:
        """Sums over all sequences."""
        return self.weighted(np.ones(len(self.rounds)))


def count(rounds: Rounds, num_sequences: int, max_depth: int) -> Counts:
    """Count rounds per sequence.

    A round that was cut stops being counted where its text ends, as censored lifetimes are
    (Kaplan and Meier, JASA 53, 1958); elsewhere no draft is a wrong draft.
    """
    depth = np.arange(1, max_depth + 1)
    num_right, is_cut = rounds.num_right[:, None], rounds.is_cut[:, None]
    right = (num_right >= depth).astype(np.float64)
    reached = (num_right + 1 - is_cut >= depth).astype(np.float64)

    def per_sequence(values: NDArray[np.generic]) -> Floats:
        sums = np.zeros((num_sequences, *values.shape[1:]))
        np.add.at(sums, rounds.sequence, values)
        return sums

    ones = np.ones(len(rounds))
    return Counts(
        per_sequence(reached), per_sequence(right), per_sequence(ones),
        per_sequence(rounds.num_drafts), per_sequence(rounds.num_right),
        per_sequence(rounds.num_emitted), per_sequence(rounds.drafts_per_drafter),
        per_sequence(rounds.right_per_drafter),
    )  # fmt: skip


@dataclass(frozen=True)
class Reliability:
    """Drafts by the probability that the drafter gave to their path: [S, Q] each."""

    drafts: Floats
    sum_q: Floats
    right: Floats

    @classmethod
    def empty(cls, num_sequences: int) -> Reliability:
        """Nothing counted yet."""
        size = (num_sequences, len(Q_EDGES) - 1)
        return cls(np.zeros(size), np.zeros(size), np.zeros(size))

    def add(self, sequence: Ints, q: Floats, is_right: Bools) -> None:
        """Count drafts, in place."""
        column = np.clip(np.searchsorted(Q_EDGES, q, side="right") - 1, 0, len(Q_EDGES) - 2)
        for sums, values in (
            (self.drafts, np.ones_like(q)),
            (self.sum_q, q),
            (self.right, is_right),
        ):
            np.add.at(sums, (sequence, column), values)
