"""Packed committed tokens as rows of requests, in fixed shapes.

Letters: B requests, T packed tokens, Q columns (`max_new_tokens`), L columns of the table of KV
slots before these tokens, D numbers per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.types import CommittedTokens


@dataclass(frozen=True)
class CommittedLayout:
    """Where each packed token stands in [B Q]. Host sync: none."""

    rows: Int[Tensor, " T"]
    """B for padding."""
    columns: Int[Tensor, " T"]
    num_requests: int
    num_columns: int

    @classmethod
    def of(cls, committed: CommittedTokens) -> CommittedLayout:
        """Positions rise from the request's committed length on."""
        is_padding = committed.requests < 0
        batch = committed.batch
        columns = committed.positions - batch.seq_lens[committed.requests.clamp(min=0)]
        return cls(
            committed.requests.masked_fill(is_padding, len(batch.slots)),
            columns.masked_fill(is_padding, 0),
            len(batch.slots),
            committed.max_new_tokens,
        )

    def spread(self, packed: Tensor) -> Tensor:
        """[T ..] to [B Q ..], zeros where a request has no token."""
        shape = (self.num_requests + 1, self.num_columns, *packed.shape[1:])
        spread = packed.new_zeros(shape)
        spread[self.rows, self.columns] = packed
        return spread[:-1]

    def num_new(self) -> Int[Tensor, " B"]:
        """Tokens of each request."""
        counts = self.rows.new_zeros(self.num_requests + 1)
        return counts.scatter_add(0, self.rows, torch.ones_like(self.rows))[:-1]

    def last(self, packed: Float[Tensor, "T D"], before: Float[Tensor, "B D"]) -> Tensor:
        """Each request's last row, [B D]; of one without a new token, `before`."""
        order = torch.arange(len(self.rows), device=self.rows.device)
        found = self.rows.new_full((self.num_requests + 1,), -1)
        found = found.scatter_reduce(0, self.rows, order, "amax")[:-1, None]
        return torch.where(found < 0, before, packed[found[:, 0].clamp(min=0)])


def kv_slots_after(committed: CommittedTokens) -> Int[Tensor, "B L+Q"]:
    """The table of KV slots with these tokens in it."""
    batch = committed.batch
    table = pad(batch.kv_slots, (0, committed.max_new_tokens, 0, 1))  # + a row for padding
    is_padding = committed.requests < 0
    rows = committed.requests.masked_fill(is_padding, len(batch.slots))
    table[rows, committed.positions.masked_fill(is_padding, 0)] = committed.kv_slots
    return table[:-1]
