"""Agreement across tensor-parallel ranks, so that rounding can never let them drift apart.

Every rank runs the drafter, and takes rank 0's candidates and rank 0's decision. Letters: B
requests, M candidates, K path width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specstack.drafters.base import Drafter, DraftRuntime, FeatureNeeds
from specstack.types import AcceptResult, CommittedTokens, DraftBatch, DraftLaw, DraftProposal
from specstack_serving import sglang_compat as sgl


def gathered(part: Tensor, dim: int) -> Tensor:
    """All ranks' parts of what tensor parallelism splits along `dim`."""
    whole: Tensor = sgl.get_parallel().tp_group.all_gather(part, dim=dim)
    return whole


def agree(accepted: AcceptResult) -> AcceptResult:
    """Rank 0's decision."""
    group = sgl.get_parallel().tp_group
    if group.world_size == 1:
        return accepted
    width = accepted.emitted.shape[1]
    fields = [accepted.accept_index, accepted.emitted, accepted.accept_lens[:, None]]
    packed = group.broadcast(torch.cat(fields, dim=1).contiguous(), src=0)
    return AcceptResult(
        accept_index=packed[:, :width],
        emitted=packed[:, width : 2 * width],
        accept_lens=packed[:, -1],
    )


class AgreedDrafter:
    """A drafter that computes in floating point, on several ranks."""

    def __init__(self, drafter: Drafter, group: Any) -> None:
        self._drafter, self._group = drafter, group

    @property
    def needs_tokens(self) -> bool:
        """As the drafter's."""
        return self._drafter.needs_tokens

    @property
    def needs(self) -> FeatureNeeds | None:
        """As the drafter's."""
        return self._drafter.needs

    @property
    def draws(self) -> bool:
        """As the drafter's."""
        return self._drafter.draws

    def attach(self, runtime: DraftRuntime) -> None:
        """Hand on."""
        self._drafter.attach(runtime)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Hand on."""
        self._drafter.begin(slot, tokens)

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        """Hand on."""
        self._drafter.observe(slot, tokens)

    def absorb(self, committed: CommittedTokens) -> None:
        """Hand on."""
        self._drafter.absorb(committed)

    def forget(self) -> None:
        """Hand on."""
        self._drafter.forget()

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        """Rank 0's candidates; their shapes depend on nothing that is rounded."""
        own = self._drafter.propose(batch, draft_budget)
        fields = [own.tokens, own.parent_index]
        if own.sources is not None:
            fields.append(own.sources.to(own.tokens.dtype))
        packed = self._group.broadcast(torch.stack(fields), src=0)
        law = own.law and DraftLaw(self._shared(own.law.tokens), self._shared(own.law.probs))
        return DraftProposal(
            packed[0],
            packed[1],
            self._shared(own.log_q),
            None if own.sources is None else packed[2].to(own.sources.dtype),
            law,
        )

    def _shared(self, values: Tensor) -> Tensor:
        shared: Tensor = self._group.broadcast(values.contiguous(), src=0)
        return shared
