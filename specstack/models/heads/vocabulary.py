"""The reduced vocabulary that a head drafts from, in EAGLE-3's format (arXiv 2503.01840).

Letters: V target vocabulary, W draft vocabulary. Draft ids are the kept target ids in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from specstack.models.heads.errors import HeadError


@dataclass(frozen=True)
class DraftVocabulary:
    """Which target tokens can be drafted, and how ids translate."""

    d2t: Int[Tensor, " W"]
    """Offsets: target id = draft id + d2t[draft id]."""
    t2d: Bool[Tensor, " V"]
    """True where a target token can be drafted."""

    def __post_init__(self) -> None:
        """Host sync: both maps must say the same, or HeadError."""
        kept = self.t2d.nonzero()[:, 0]
        if not torch.equal(kept, self.token_ids):
            raise HeadError(
                f"d2t ({len(self.d2t)} draft tokens) and t2d ({len(kept)} target tokens) disagree"
            )

    @classmethod
    def from_counts(cls, counts: Shaped[Tensor, " V"], size: int) -> DraftVocabulary:
        """Keep the `size` tokens seen most often; of equals, the lower ids."""
        if not 1 <= size <= len(counts):
            raise ValueError(f"size {size} is not in 1..{len(counts)}, the tokens counted")
        kept = counts.sort(descending=True, stable=True).indices[:size].sort().values
        t2d = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
        t2d[kept] = True
        return cls(kept - torch.arange(size, device=counts.device), t2d)

    @property
    def token_ids(self) -> Int[Tensor, " W"]:
        """The target id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target(self, ids: Int[Tensor, "*S"]) -> Int[Tensor, "*S"]:
        """Draft ids to target ids."""
        return ids + self.d2t[ids]

    def to_draft(self, ids: Int[Tensor, "*S"]) -> Int[Tensor, "*S"]:
        """Target ids to draft ids; -1 for tokens that cannot be drafted."""
        ranks = self.t2d.long().cumsum(0) - 1
        return torch.where(self.t2d[ids], ranks[ids], -1)
