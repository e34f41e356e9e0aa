"""What is tapped from the target: hidden states, keys and values of verified tokens.

Letters: *T any leading token axes, n tapped layers (hidden), m tapped layers (KV), D hidden size,
G KV heads, C head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class TargetFeatures:
    """Features per token, layers in the order of the head's config; None where not tapped."""

    hidden: Float[Tensor, "*T n D"] | None = None
    keys: Float[Tensor, "*T m G C"] | None = None
    """After k-norm and RoPE at the token's position, as the target's KV pool holds them."""
    values: Float[Tensor, "*T m G C"] | None = None

    def index(self, tokens: Any) -> TargetFeatures:
        """Index the token axes as a tensor would be: an int, slice, mask, index tensor, tuple."""
        return self._map(lambda tensor: tensor[tokens])

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TargetFeatures:
        """The same features elsewhere."""
        return self._map(lambda tensor: tensor.to(device=device, dtype=dtype))

    @staticmethod
    def cat(parts: Sequence[TargetFeatures]) -> TargetFeatures:
        """Features of one head's, after each other along the first token axis."""

        def cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
            present = [tensor for tensor in tensors if tensor is not None]
            return torch.cat(present) if present else None

        return TargetFeatures(
            cat([part.hidden for part in parts]),
            cat([part.keys for part in parts]),
            cat([part.values for part in parts]),
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> TargetFeatures:
        fields = (self.hidden, self.keys, self.values)
        return TargetFeatures(*(None if field is None else change(field) for field in fields))
