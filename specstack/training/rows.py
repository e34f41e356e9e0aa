"""What is scored: one row per draft, with the place of the target's distribution to meet.

The draft of depth k after anchor a says token a + k, for which the target's distribution stands at
token a + k - 1. A MASK slot says its own token; a real slot, in a block that is refreshed, says
the one after it. Letters: B sequences, L tokens, A anchors, S outputs per anchor, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack.models.heads.config import HeadConfig
from specstack.training.batches import Batch


@dataclass(frozen=True)
class Rows:
    """Rows in the order of the target's places, so that neighbours share them."""

    output: Int[Tensor, " N"]
    """Of the flattened outputs [B * A * S]."""
    block: Int[Tensor, " N"]
    """Of the flattened anchors [B * A]."""
    depth: Int[Tensor, " N"]
    place: Int[Tensor, " N"]
    """Of the target's distribution, in the flattened tokens [B * L]."""
    parents: Int[Tensor, " N"]
    """The token before, as target id."""
    labels: Int[Tensor, " N"]
    """The token itself, as target id."""

    def __len__(self) -> int:
        return len(self.output)

    def where(self, keep: Bool[Tensor, " N"]) -> Rows:
        """Some of the rows."""
        fields = (self.output, self.block, self.depth, self.place, self.parents, self.labels)
        return Rows(*(field[keep] for field in fields))


def output_depths(batch: Batch, config: HeadConfig) -> Int[Tensor, "B A S"]:
    """The depth that each output drafts; 0 for none."""
    slots = torch.arange(config.num_slots, device=batch.anchors.device)
    if config.form == "autoregressive" or config.slots == "seeded":
        return (slots + 1).expand(*batch.anchors.shape, -1)
    num_real = batch.num_real[..., None]
    says_next = (slots < num_real) & (num_real > 1)
    depths = torch.where(says_next, slots + 1, slots)
    return depths * (depths < config.block_size)


def rows_of(batch: Batch, config: HeadConfig) -> Rows:
    """Every draft whose token exists. Host sync: their number."""
    depths = output_depths(batch, config)
    anchors = batch.anchors[..., None]
    exists = (anchors >= 0) & (depths > 0) & (anchors + depths < batch.num_tokens[:, None, None])
    output = exists.flatten().nonzero()[:, 0]
    block = output // config.num_slots
    depth = depths.flatten()[output]
    start = torch.arange(len(batch.tokens), device=output.device) * batch.tokens.shape[1]
    place = (start[:, None] + batch.anchors).flatten()[block] + depth - 1
    tokens = batch.tokens.flatten()
    rows = Rows(output, block, depth, place, tokens[place], tokens[place + 1])
    return rows.where(place.argsort(stable=True))
