"""Several drafters in one: their candidates in one trie per request, each with its sources.

A path that several propose is one candidate. Its log q is the largest of theirs, given its parent
(docs/decisions/0006-merged-drafts.md). Letters: B requests, M candidates of all drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.drafters.base import Drafter, DraftRuntime, FeatureNeeds
from specstack.models.heads.features import TargetFeatures
from specstack.types import CommittedTokens, DraftBatch, DraftProposal

_TOKEN_BITS = 32


class MergeDrafter:
    """Asks every drafter and merges what they say."""

    draws = False

    def __init__(self, of: Sequence[Drafter], max_depth: int) -> None:
        """Merge these; no path is longer than `max_depth`."""
        self._of = list(of)
        self._max_depth = max_depth
        self.needs_tokens = any(drafter.needs_tokens for drafter in of)
        self.needs = _union([drafter.needs for drafter in of if drafter.needs is not None])

    def attach(self, runtime: DraftRuntime) -> None:
        """Lend to those that read features."""
        for drafter in self._of:
            if drafter.needs is not None:
                drafter.attach(runtime)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Start a request with those that read tokens."""
        for drafter in self._of:
            if drafter.needs_tokens:
                drafter.begin(slot, tokens)

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens with those that read them."""
        for drafter in self._of:
            if drafter.needs_tokens:
                drafter.observe(slot, tokens)

    def absorb(self, committed: CommittedTokens) -> None:
        """Give each drafter the layers that it asked for."""
        assert self.needs is not None
        for drafter in self._of:
            if drafter.needs is not None:
                features = _select(committed.features, self.needs, drafter.needs)
                drafter.absorb(replace(committed, features=features))

    def forget(self) -> None:
        """Tell all."""
        for drafter in self._of:
            drafter.forget()

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        """The candidates of all, merged where the batch is; host candidates are copied there."""
        proposals = [drafter.propose(batch, draft_budget) for drafter in self._of]
        devices = {proposal.tokens.device for proposal in proposals}
        device = devices.pop() if len(devices) == 1 else batch.seq_lens.device
        return merge_proposals(proposals, self._max_depth, device)


def merge_proposals(
    proposals: Sequence[DraftProposal], max_depth: int, device: torch.device
) -> DraftProposal:
    """One trie per request of the candidates of all. Host sync: copies from elsewhere alone.

    Bit i of `sources` stands for proposal i. A candidate keeps the place of its first occurrence,
    so parents stay before children and those of one source in its order.
    """
    tokens = _beside([proposal.tokens for proposal in proposals], device)
    log_q = _beside([proposal.log_q for proposal in proposals], device)
    offsets = [0]
    for proposal in proposals:
        offsets.append(offsets[-1] + proposal.tokens.shape[1])
    shifted = [
        torch.where(p.parent_index < 0, -1, p.parent_index + offset)
        for p, offset in zip(proposals, offsets, strict=False)
    ]
    parents = _beside(shifted, device)
    bits = [torch.full_like(p.tokens, 1 << i) for i, p in enumerate(proposals)]
    is_live = log_q > -torch.inf
    first = _first_occurrences(tokens, parents, is_live, max_depth)
    best = log_q.scatter_reduce(1, first, log_q, "amax")
    # No source proposes a path twice, so that adding bits is joining them.
    sources = _beside(bits, device).masked_fill(~is_live, 0)
    sources = torch.zeros_like(sources).scatter_add(1, first, sources)
    is_kept = is_live & (first == torch.arange(tokens.shape[1], device=device))
    return _kept_first(tokens, _parents_of(parents, first), best, sources, is_kept)


def _first_occurrences(
    tokens: Int[Tensor, "B M"],
    parents: Int[Tensor, "B M"],
    is_live: Bool[Tensor, "B M"],
    max_depth: int,
) -> Int[Tensor, "B M"]:
    """The first candidate with the same path as each; after k steps right down to depth k."""
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    first = index
    for _ in range(max_depth):
        keys = ((_parents_of(parents, first) + 1) << _TOKEN_BITS) + tokens
        keys = torch.where(is_live, keys, -1 - index)  # dead ones equal nothing
        ranked, order = keys.sort(dim=1, stable=True)
        starts = pad(ranked[:, 1:] != ranked[:, :-1], (1, 0), value=True)
        run = torch.where(starts, index, 0).cummax(dim=1).values
        first = torch.empty_like(order).scatter(1, order, order.gather(1, run))
    return first


def _parents_of(parents: Int[Tensor, "B M"], first: Int[Tensor, "B M"]) -> Int[Tensor, "B M"]:
    """Parents, each by its first occurrence."""
    return torch.where(parents < 0, -1, first.gather(1, parents.clamp(min=0)))


def _kept_first(
    tokens: Tensor, parents: Tensor, log_q: Tensor, sources: Tensor, is_kept: Bool[Tensor, "B M"]
) -> DraftProposal:
    """Move what is kept to the front, in its order."""
    order = (~is_kept).to(torch.uint8).sort(dim=1, stable=True).indices
    place = torch.empty_like(order).scatter(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    is_kept = is_kept.gather(1, order)
    parents = _parents_of(parents.gather(1, order), place)
    return DraftProposal(
        tokens.gather(1, order).masked_fill(~is_kept, 0),
        parents.masked_fill(~is_kept, -1),
        log_q.gather(1, order).masked_fill(~is_kept, -torch.inf),
        sources.gather(1, order).masked_fill(~is_kept, 0),
    )


def _beside(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([part.to(device, non_blocking=True) for part in parts], dim=1)


def _union(needs: Sequence[FeatureNeeds]) -> FeatureNeeds | None:
    if not needs:
        return None
    return FeatureNeeds(
        tuple(sorted({layer for one in needs for layer in one.target_layers})),
        tuple(sorted({layer for one in needs for layer in one.kv_layers})),
    )


def _select(features: TargetFeatures, given: FeatureNeeds, wanted: FeatureNeeds) -> TargetFeatures:
    """The layers that one drafter asked for, of those that all asked for."""

    def pick(tensor: Tensor | None, have: tuple[int, ...], want: tuple[int, ...]) -> Tensor | None:
        if tensor is None or not want:
            return None
        if have == want:
            return tensor
        return torch.stack([tensor[:, have.index(layer)] for layer in want], dim=1)

    return TargetFeatures(
        pick(features.hidden, given.target_layers, wanted.target_layers),
        pick(features.keys, given.kv_layers, wanted.kv_layers),
        pick(features.values, given.kv_layers, wanted.kv_layers),
    )
