"""The target's frozen tables, which a head reads and never stores.

Letters: V vocabulary, D hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specstack.models.heads.errors import HeadError

_NUM_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class TargetTables:
    """Embedding and lm_head of the target; one tensor where they are tied."""

    embedding: Float[Tensor, "V D"]
    lm_head: Float[Tensor, "V D"]

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor]) -> TargetTables:
        """Take them from a state dict under Hugging Face's names; without lm_head: tied."""
        try:
            embedding = weights["model.embed_tokens.weight"].detach()
        except KeyError as error:
            raise HeadError(f"the target's weights have no {error.args[0]}") from None
        return cls(embedding, weights.get("lm_head.weight", embedding).detach())

    @property
    def are_tied(self) -> bool:
        """Both are the same memory."""
        return self.lm_head.data_ptr() == self.embedding.data_ptr()

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TargetTables:
        """The same tables elsewhere; tied ones stay one tensor."""
        embedding = self.embedding.to(device=device, dtype=dtype)
        if self.are_tied:
            return TargetTables(embedding, embedding)
        return TargetTables(embedding, self.lm_head.to(device=device, dtype=dtype))

    def fingerprint(self) -> str:
        """Name the target by some rows of both tables, the same for float32 and bfloat16 copies.

        Host sync: copies the rows.
        """
        digest = hashlib.sha256()
        for table in (self.embedding, self.lm_head):
            rows = table.detach()[:: max(1, len(table) // _NUM_SAMPLED_ROWS)]
            bits = rows.to(torch.bfloat16).cpu().contiguous().view(torch.int16)
            digest.update(bits.numpy().astype("<i2").tobytes())
        return digest.hexdigest()[:16]
