"""Features of rounds that decoded plainly, kept until somebody drafts again.

A drafter must hear of every committed token, or it would draft from a hole later; but while
nothing is drafted nobody waits for it, and one call over many rounds reads its weights once.
What waits is handed over in the order of the rounds and before anything newer, so that a KV slot
that changed its owner meanwhile ends with its new owner's context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specstack.drafters.base import Drafter
from specstack.models.heads.features import TargetFeatures
from specstack.types import CommittedTokens

MAX_WAITING_TOKENS = 512
"""Bounds the memory of what waits: a few megabytes per thousand hidden numbers of a token."""


class Backlog:
    """Rounds over one and the same batch, joined when they are handed over."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._waiting: list[CommittedTokens] = []
        self._num_tokens = 0

    def add(self, committed: CommittedTokens) -> None:
        """Keep a round's features. Host sync: none."""
        if self._waiting and self._waiting[0].batch.slots != committed.batch.slots:
            self.flush()
        if self._waiting:  # the first round's table of slots serves them all
            committed = replace(committed, batch=self._waiting[0].batch)
        self._waiting.append(committed)
        self._num_tokens += len(committed.next_tokens)
        if self._num_tokens >= MAX_WAITING_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits. Host sync: none."""
        if not self._waiting:
            return
        waiting, self._waiting, self._num_tokens = self._waiting, [], 0
        self._drafter.absorb(waiting[0] if len(waiting) == 1 else joined(waiting))


def joined(rounds: Sequence[CommittedTokens]) -> CommittedTokens:
    """Successive rounds of the same requests as one. Host sync: none."""

    def cat(values: Callable[[CommittedTokens], Tensor]) -> Tensor:
        return torch.cat([values(one) for one in rounds])

    return CommittedTokens(
        features=TargetFeatures.cat([one.features for one in rounds]),
        next_tokens=cat(lambda one: one.next_tokens),
        positions=cat(lambda one: one.positions),
        kv_slots=cat(lambda one: one.kv_slots),
        requests=cat(lambda one: one.requests),
        batch=rounds[0].batch,
        max_new_tokens=sum(one.max_new_tokens for one in rounds),
    )
