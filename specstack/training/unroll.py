"""The training-time test of an autoregressive head from chosen anchors (EAGLE-3, 2503.01840).

Equal to the heads' `ttt_mask` over all inputs, but later steps run only where a draft begins.
Input i is (token i + 1, features of token i); the draft after anchor a begins at input a - 1.
Letters: B sequences, L tokens, A anchors, Q inputs = context slots (L - 1), N rows, K depth,
D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.layers import LayerKV, join
from specstack.training.batches import Batch


@dataclass(frozen=True)
class _Seen:
    """What rows see of the context and of the first step's inputs."""

    context: Bool[Tensor, "B N Q"]
    cross: Bool[Tensor, "B N Q"]
    """First inputs, where there is a context: themselves, and mixed tokens."""
    own: Bool[Tensor, "B N Q"]
    """First inputs, for self-attention."""


def unroll(
    head: AutoregressiveHead, batch: Batch, features: TargetFeatures, depth: int
) -> Float[Tensor, "B A K D"]:
    """Hidden states of every draft; what lies beyond a text's end is meaningless."""
    num_inputs = batch.tokens.shape[1] - 1
    places = torch.arange(num_inputs, device=batch.tokens.device).expand(len(batch.tokens), -1)
    known = features.index((slice(None), slice(num_inputs)))
    context = head.context(known, places)
    seen = _seen(places, batch)
    masks = _masks(head, seen, [])
    hidden, owns = head(batch.tokens[:, 1:], head.fuse(known), places + 1, None, context, *masks)
    chains = (batch.anchors - 1).clamp(min=0)  # [B, A]
    seen = _seen(chains, batch)
    hidden = hidden.gather(1, chains[..., None].expand(-1, -1, hidden.shape[-1]))
    outputs = [hidden]
    for step in range(1, depth):
        masks = _masks(head, seen, [_chain_mask(chains)] * step)
        at = (chains + 1 + step).clamp(max=num_inputs)
        tokens = batch.tokens.gather(1, at)
        hidden, own = head(tokens, hidden, chains + 1 + step, owns, context, *masks)
        owns = _appended(owns, own)
        outputs.append(hidden)
    return torch.stack(outputs, dim=2)


def _appended(owns: list[LayerKV], own: list[LayerKV]) -> list[LayerKV]:
    return [join(earlier, latest) for earlier, latest in zip(owns, own, strict=True)]


def _seen(rows: Int[Tensor, "B N"], batch: Batch) -> _Seen:
    columns = torch.arange(batch.tokens.shape[1] - 1, device=rows.device)
    row = rows[..., None]
    causal = columns <= row
    mixed = batch.mixed[:, None]  # [B, 1, L]
    stands_in = mixed[..., 1:] & (columns < row)  # input j stands for token j + 1
    return _Seen(causal & ~mixed[..., :-1], (columns == row) | stands_in, causal)


def _chain_mask(chains: Int[Tensor, "B A"]) -> Bool[Tensor, "B A A"]:
    own = torch.eye(chains.shape[1], dtype=torch.bool, device=chains.device)
    return own.expand(len(chains), -1, -1)


def _masks(
    head: AutoregressiveHead, seen: _Seen, later: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The arguments mask and self_mask; `later` are the columns of the steps after the first."""
    own = torch.cat([seen.own, *later], dim=-1)
    if not head.target_kv:
        return own, None
    mask = torch.cat([seen.context, seen.cross, *later], dim=-1)
    return mask, own if head.is_gated else None
