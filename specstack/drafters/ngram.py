"""The n-gram drafter: what followed the last tokens when they last occurred in the request.

Prompt lookup (Saxena 2023; LLMA, arXiv 2304.04487) with several occurrences per context, so that
it proposes trees with probabilities. No model and no tensor until the last step: it runs on the
host. `suffix_index` finds the occurrences, `continuations` turns them into candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specstack.drafters.base import TokenDrafter
from specstack.drafters.continuations import Candidates, Continuations
from specstack.drafters.shared_history import SharedHistory
from specstack.drafters.suffix_index import SuffixIndex
from specstack.types import DraftBatch, DraftProposal


def match_weight(match_len: int) -> float:
    """Return the odds that the token after a lone match of this length is right.

    Fitted to what a small chat model writes: docs/decisions/0003-ngram-drafter.md.
    """
    return max(0.5, match_len - 1.0)


class NgramDrafter(TokenDrafter):
    """Keeps each slot's tokens and proposes their earlier continuations."""

    def __init__(
        self,
        max_depth: int,
        min_match: int = 2,
        max_match: int = 16,
        max_occurrences: int = 16,
        shared_tokens: int = 0,
    ) -> None:
        """Set the limits of the search.

        Args:
            max_depth: longest proposed path.
            min_match: shortest context that counts as found.
            max_match: longest context that is compared.
            max_occurrences: occurrences of a context that vote.
            shared_tokens: tokens of finished requests to look in after the request's own. 0 is
                off: a request's speed then says nothing about other requests' texts.
        """
        if max_depth < 1 or max_occurrences < 1 or not 1 <= min_match <= max_match:
            raise ValueError(
                "need max_depth >= 1, max_occurrences >= 1 and 1 <= min_match <= max_match, got "
                f"{max_depth}, {max_occurrences}, {min_match}, {max_match}"
            )
        if shared_tokens < 0 or shared_tokens == 1:
            raise ValueError(f"shared_tokens must be 0 or at least 2, got {shared_tokens}")
        self._max_depth = max_depth
        self._min_match = min_match
        self._max_match = max_match
        self._max_occurrences = max_occurrences
        self._weights = [match_weight(n) for n in range(max_match + 1)]
        self._slots: dict[int, SuffixIndex] = {}
        self._shared = SharedHistory(shared_tokens, min_match, max_match) if shared_tokens else None

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Start a request whose committed tokens (prompt and output so far) are `tokens`."""
        self.end(slot)
        self._slots[slot] = SuffixIndex(self._min_match, self._max_match)
        self._slots[slot].extend(tokens)

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens that the request has emitted, in order."""
        self._slots[slot].extend(tokens)

    def end(self, slot: int) -> None:
        """Free a slot, if it is taken; its tokens go to the shared history, if there is one."""
        finished = self._slots.pop(slot, None)
        if finished is not None and self._shared is not None:
            self._shared.add(finished.tokens)

    def forget(self) -> None:
        """Drop the shared history, and the slots that would go there."""
        self._slots.clear()
        if self._shared is not None:
            self._shared.clear()

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        """Propose the best `draft_budget` candidates of each slot and its most probable chain."""
        return self.continue_slots(batch.slots, draft_budget)

    def continue_slots(self, slots: Sequence[int], draft_budget: int) -> DraftProposal:
        """As `propose`; a slot is all that this drafter needs to know of a request."""
        if draft_budget == 0:
            return _pack([Candidates() for _ in slots])
        return _pack([self._continue(self._slots[slot], draft_budget) for slot in slots])

    def _continue(self, index: SuffixIndex, draft_budget: int) -> Candidates:
        occurrences = index.find_end(self._max_occurrences)
        missing = self._max_occurrences - len(occurrences)
        if self._shared is not None and missing:
            occurrences += self._shared.find(index.tokens[-self._max_match :], missing)
        continuations = Continuations(index.tokens, self._weights, self._max_depth)
        continuations.take_best(occurrences, draft_budget)
        continuations.take_chain(draft_budget)
        return continuations.candidates


def _pack(rows: Sequence[Candidates]) -> DraftProposal:
    """Pad rows to the longest one."""
    width = max((len(row.tokens) for row in rows), default=0)
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    parent_index = np.full((len(rows), width), -1, dtype=np.int64)
    log_q = np.full((len(rows), width), -np.inf, dtype=np.float32)
    for i, row in enumerate(rows):
        length = len(row.tokens)
        tokens[i, :length] = row.tokens
        parent_index[i, :length] = row.parent_index
        log_q[i, :length] = row.log_q
    return DraftProposal(
        torch.from_numpy(tokens), torch.from_numpy(parent_index), torch.from_numpy(log_q)
    )
