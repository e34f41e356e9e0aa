"""All blocks of a batch in one forward of a block head (DFlash, arXiv 2602.06036).

Letters: B sequences, L tokens, A anchors, S slots of a block, D hidden size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.models.heads.block import BlockHead, block_tokens
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.masks import block_mask
from specstack.training.batches import Batch


def slot_places(anchors: Int[Tensor, "B A"], num_slots: int) -> Int[Tensor, "B A S"]:
    """Positions of the slots of each block."""
    return anchors.clamp(min=0)[..., None] + torch.arange(num_slots, device=anchors.device)


def tokens_at(tokens: Int[Tensor, "B L"], places: Int[Tensor, "B A S"]) -> Int[Tensor, "B A S"]:
    """Tokens at places; beyond the end the last one."""
    at = places.clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, at.flatten(1)).view_as(places)


def block_hidden(
    head: BlockHead, batch: Batch, features: TargetFeatures
) -> Float[Tensor, "B A S D"]:
    """Hidden states of every slot; `batch.num_real` slots carry real tokens, others MASK."""
    num_slots, length = head.config.num_slots, batch.tokens.shape[1]
    places = slot_places(batch.anchors, num_slots)
    is_real = torch.arange(num_slots, device=places.device) < batch.num_real[..., None]
    real = tokens_at(batch.tokens, places)
    slots = torch.where(is_real, real, block_tokens(real[..., 0], num_slots))
    mask = block_mask(batch.anchors, batch.num_tokens, num_slots, length, head.config.mask)
    positions = torch.arange(length, device=places.device).expand(len(places), -1)
    fused = head.fuse(features)
    context = head.context(features, positions, fused)
    seed = _before(fused, places) if fused is not None and head.is_seeded else None
    hidden: Tensor = head(slots.flatten(1), places.flatten(1), context, mask, seed)
    return hidden.view(*places.shape, -1)


def _before(
    fused: Float[Tensor, "B L D"], places: Int[Tensor, "B A S"]
) -> Float[Tensor, "B A*S D"]:
    """The features that end before each anchor, in every slot."""
    last = (places[..., :1] - 1).clamp(min=0).expand_as(places).flatten(1)
    return fused.gather(1, last[..., None].expand(-1, -1, fused.shape[-1]))
