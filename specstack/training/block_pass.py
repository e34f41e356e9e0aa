"""All blocks of a batch in one forward of a block head (DFlash, arXiv 2602.06036).

Letters: B sequences, L tokens, A anchors, S slots of a block, D hidden size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.models.heads.block import BlockHead
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
    num_slots, length = head.config.block_size, batch.tokens.shape[1]
    places = slot_places(batch.anchors, num_slots)
    is_real = torch.arange(num_slots, device=places.device) < batch.num_real[..., None]
    mask_token = head.config.mask_token_id
    slots = tokens_at(batch.tokens, places).masked_fill(~is_real, mask_token)
    mask = block_mask(batch.anchors, batch.num_tokens, num_slots, length, head.config.mask)
    positions = torch.arange(length, device=places.device).expand(len(places), -1)
    context = head.context(features, positions)
    hidden: Tensor = head(slots.flatten(1), places.flatten(1), context, mask)
    return hidden.view(*places.shape, -1)
