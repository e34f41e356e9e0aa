"""The contract of a drafter: propose continuations of each running request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specstack.types import DraftProposal


class Drafter(Protocol):
    """Keeps state per slot: a small integer that a request owns while it runs.

    The worker calls `begin` when a request has been prefilled (again, after a retraction),
    `observe` with every token emitted since, and `propose` once a round. A slot is reused
    without notice: `begin` replaces what it held.
    """

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Start a request whose committed tokens (prompt and output so far) are `tokens`."""

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens that the request has emitted, in order."""

    def propose(self, slots: Sequence[int], draft_budget: int) -> DraftProposal:
        """Propose at least the best `draft_budget` candidates (if there are as many) per slot.

        The last observed token of a slot is the root; candidates continue it.
        """
