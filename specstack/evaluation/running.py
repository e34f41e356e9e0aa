"""A batch of texts on its way through the rounds, whichever target verifies.

Requests keep their slot; those that reached the end of their text leave. KV of row b, column i has
slot b * L + i of one flat pool. Letters: B requests, L columns, K path width, T = B * K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from specstack.evaluation.observed import Observed
from specstack.models.heads.features import TargetFeatures
from specstack.round import Target
from specstack.types import AcceptResult, CommittedTokens, DraftBatch


class RunningBatch(Target, Protocol):
    """A target with its own requests."""

    @property
    def slots(self) -> Sequence[int]:
        """Requests that go on."""

    @property
    def bonus_tokens(self) -> Int[Tensor, " B"]:
        """Their roots."""

    @property
    def seq_lens(self) -> Int[Tensor, " B"]:
        """Their committed tokens."""

    @property
    def observed(self) -> Observed:
        """Of the last round."""

    def prefill(self) -> CommittedTokens | None:
        """Compute the prompts and the first token of every answer; features if any are needed."""

    def drop_finished(self) -> None:
        """Let those go that reached their end."""


class KvTable:
    """The flat KV slots of a batch."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        index = torch.arange(num_rows * num_columns, device=device)
        self.slots: Int[Tensor, "B L"] = index.view(num_rows, num_columns)

    @property
    def num_kv_slots(self) -> int:
        """All slots are below this."""
        return self.slots.numel()

    def batch(
        self,
        slots: Sequence[int],
        bonus_tokens: Int[Tensor, " B"],
        seq_lens: Int[Tensor, " B"],
        has_features: bool,
    ) -> DraftBatch:
        """The requests as a drafter sees them. Host sync: their longest length."""
        num_columns = int(seq_lens.max()) if has_features and len(slots) else 0
        return DraftBatch(
            tuple(slots), bonus_tokens, seq_lens, self.slots[list(slots), :num_columns]
        )


def committed_path(
    batch: DraftBatch,
    table: KvTable,
    accepted: AcceptResult,
    features: TargetFeatures,
) -> CommittedTokens:
    """The accepted paths as committed tokens; `features` are [T ..], padding included."""
    step = torch.arange(accepted.accept_index.shape[1], device=batch.seq_lens.device)
    columns = (batch.seq_lens[:, None] + step).clamp(max=table.slots.shape[1] - 1)
    rows = torch.tensor(batch.slots, device=step.device)[:, None]
    return CommittedTokens.of_paths(batch, accepted, table.slots[rows, columns], features)


def committed_prompts(
    slots: Sequence[int],
    table: KvTable,
    tokens: Sequence[Sequence[int]],
    features: TargetFeatures,
    device: torch.device,
) -> CommittedTokens:
    """Whole prompts as committed tokens.

    Args:
        tokens: per request its prompt and the first token of its answer.
        features: [T ..] of the prompts, one after the other.
    """
    lengths = [len(text) - 1 for text in tokens]
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    positions = [position for length in lengths for position in range(length)]
    requests = torch.tensor(rows, device=device)
    place = torch.tensor(positions, device=device)
    none = torch.zeros(len(slots), dtype=torch.int64, device=device)
    batch = DraftBatch(tuple(slots), none, none, table.slots[list(slots), :0])
    return CommittedTokens(
        features=features,
        next_tokens=torch.tensor([t for text in tokens for t in text[1:]], device=device),
        positions=place,
        kv_slots=table.slots[torch.tensor(list(slots), device=device)[requests], place],
        requests=requests,
        batch=batch,
        max_new_tokens=max(lengths),
    )
