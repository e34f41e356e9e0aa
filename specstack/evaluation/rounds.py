"""Runs one configuration over a batch of texts and notes what every round shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specstack.budget.base import Budget
from specstack.evaluation.observed import Observed
from specstack.evaluation.running import RunningBatch
from specstack.evaluation.tallies import Ints, Reliability, Rounds
from specstack.round import MAX_DRAFTERS, Speculator, drafters_of
from specstack.types import DraftTree


class Notes:
    """Rounds and drafts of one configuration, over all batches."""

    def __init__(self, num_sequences: int) -> None:
        self._parts: list[Rounds] = []
        self.reliability = Reliability.empty(num_sequences)

    @property
    def rounds(self) -> Rounds:
        """All rounds so far."""
        return Rounds.join(self._parts)

    def add(
        self, sequences: Ints, context_lens: Ints, num_emitted: Ints, tree: DraftTree,
        batch: RunningBatch,
    ) -> None:  # fmt: skip
        """Note one round of some requests."""
        observed, num_nodes = batch.observed, tree.num_nodes.cpu().numpy()
        self._parts.append(
            Rounds(
                sequences,
                context_lens,
                observed.num_right.cpu().numpy(),
                observed.is_cut.long().cpu().numpy(),
                num_nodes - 1,
                num_emitted,
                *_per_drafter(tree, observed),
            )
        )
        node = np.arange(tree.num_draft_tokens)
        counted = (node > 0) & (node < num_nodes[:, None]) & ~observed.is_unknown(tree).numpy()
        rows, _ = counted.nonzero()
        q = tree.log_q.double().exp().cpu().numpy()[counted]
        self.reliability.add(sequences[rows], q, observed.is_right(tree).numpy()[counted])


def _per_drafter(tree: DraftTree, observed: Observed) -> tuple[Ints, Ints]:
    """Drafts and right drafts of each drafter of a merge; 0 without one."""
    if tree.sources is None:
        none = np.zeros((len(tree.tokens), MAX_DRAFTERS), dtype=np.int64)
        return none, none
    is_from, on_path = drafters_of(tree.sources, observed.accept_index)
    return is_from.sum(1).cpu().numpy(), on_path.sum(1).cpu().numpy()


@torch.no_grad()
def run_batch(
    speculator: Speculator,
    budget: Budget,
    batch: RunningBatch,
    prompts: Sequence[Sequence[int]],
    sequences: Ints,
    notes: Notes,
) -> None:
    """Run rounds until every request has reached its end; text i is in slot i."""
    committed = batch.prefill()
    for slot in batch.slots:
        speculator.begin(slot, prompts[slot], [])
    if speculator.needs is not None:
        assert committed is not None
        speculator.absorb(committed)
    first = batch.bonus_tokens
    speculator.emitted(batch.slots, first[:, None], torch.ones_like(first))
    batch.drop_finished()
    while batch.slots:
        slots, before = list(batch.slots), batch.seq_lens.cpu().numpy()
        speculate = [True] * len(slots)
        outcome = speculator.round(slots, batch.bonus_tokens, speculate, budget, batch)
        num_emitted = outcome.accepted.accept_lens.long().cpu().numpy()
        notes.add(sequences[slots], before, num_emitted, outcome.tree, batch)
        batch.drop_finished()
