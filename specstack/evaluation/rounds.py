"""Runs one configuration over a batch of texts and notes what every round shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from specstack.budget.base import Budget
from specstack.evaluation.observed import Observed
from specstack.evaluation.running import RunningBatch
from specstack.evaluation.tallies import Bools, Ints, Places, Reliability, Rounds
from specstack.outcome import MAX_DRAFTERS, drafters_of
from specstack.round import Speculator
from specstack.trees.tries import on_spine, sibling_ranks
from specstack.types import DraftTree


class Notes:
    """Rounds and drafts of one configuration, over all batches."""

    def __init__(self, num_sequences: int, *, keeps_places: bool = False) -> None:
        self._parts: list[Rounds] = []
        self._places: list[Places] | None = [] if keeps_places else None
        self.reliability = Reliability.empty(num_sequences)

    @property
    def rounds(self) -> Rounds:
        """All rounds so far."""
        return Rounds.join(self._parts)

    @property
    def places(self) -> Places:
        """Drafts so far, with their places in the trees."""
        assert self._places is not None, "made without keeps_places"
        return Places.join(self._places)

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
        is_right = observed.is_right(tree).numpy()
        self.reliability.add(sequences[rows], q, is_right[counted])
        if self._places is not None:
            self._places.append(_places(sequences, tree, counted, is_right))


def _places(sequences: Ints, tree: DraftTree, counted: Bools, is_right: Bools) -> Places:
    """Those of the counted drafts whose parent is right."""
    parent, path_log_q = tree.parent_index[:, 1:], tree.log_q.double()
    ranks = sibling_ranks(parent - 1, path_log_q[:, 1:])
    spine = on_spine(parent - 1, ranks, int(tree.depth.max()))
    continues_spine = pad(spine, (1, 0), value=True).gather(1, parent)
    log_q = path_log_q[:, 1:] - path_log_q.gather(1, parent)
    tested = counted[:, 1:] & np.take_along_axis(is_right, parent.cpu().numpy(), axis=1)
    return Places(
        sequences[tested.nonzero()[0]],
        tree.depth[:, 1:].cpu().numpy()[tested].astype(np.int16),
        ranks.cpu().numpy()[tested].astype(np.int16),
        continues_spine.cpu().numpy()[tested],
        log_q.cpu().numpy()[tested].astype(np.float32),
        is_right[:, 1:][tested],
    )


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
