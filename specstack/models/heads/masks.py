"""Who sees whom: boolean masks, row attends column.

Letters: B sequences, A blocks, S block size, N nodes, P context slots, Q inputs. Context slot j
holds token j of the sequence. A block's anchor is a token whose own features do not exist yet
when the block is drafted, so its context ends strictly before it.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def block_mask(
    anchors: Int[Tensor, "B A"],
    num_context: Int[Tensor, " B"],
    block_size: int,
    max_context: int,
    kind: Literal["bidirectional", "tree_causal"],
) -> Bool[Tensor, "B A*S P+A*S"]:
    """Mask of A blocks side by side, each [anchor, MASK x (S - 1)]; P = max_context.

    Args:
        anchors: index of the anchor token; a negative one (no block) sees no context.
        num_context: live context slots.
    """
    num_blocks = anchors.shape[1]
    slots = torch.arange(max_context, device=anchors.device)
    ends = torch.minimum(anchors, num_context[:, None])  # [B, A]
    context = (slots < ends[..., None]).repeat_interleave(block_size, dim=1)  # [B, A*S, P]
    own = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if kind == "tree_causal":
        own = own.tril()
    same_block = torch.eye(num_blocks, dtype=torch.bool, device=anchors.device)
    blocks = torch.kron(same_block, own).expand(len(anchors), -1, -1)
    return torch.cat([context, blocks], dim=-1)


def tree_mask(
    ancestors: Bool[Tensor, "B N N"], num_context: Int[Tensor, " B"], max_context: int
) -> Bool[Tensor, "B N P+N"]:
    """Mask of a tree's nodes (`DraftTree.tree_mask`): live context, ancestors, themselves."""
    slots = torch.arange(max_context, device=ancestors.device)
    context = (slots < num_context[:, None])[:, None].expand(-1, ancestors.shape[1], -1)
    return torch.cat([context, ancestors], dim=-1)


def ttt_mask(num_inputs: Int[Tensor, " B"], max_inputs: int, step: int) -> Bool[Tensor, "B Q K"]:
    """Mask of step `step` (from 0) of the training-time test (EAGLE-3), K = (step + 1) * Q.

    The keys of steps 0..step-1 are the prefix, those of this step come last. Input i of a later
    step is the draft that follows input i of the step before: it sees the true inputs up to i
    (step 0) and its own chain (column i of the later steps).
    """
    rows = torch.arange(max_inputs, device=num_inputs.device)
    true_inputs = (rows <= rows[:, None]) & (rows[:, None] < num_inputs[:, None, None])
    return torch.cat([true_inputs, *[_own_chain(num_inputs, max_inputs)] * step], dim=-1)


def ttt_context_mask(
    num_inputs: Int[Tensor, " B"], max_inputs: int, max_context: int, step: int
) -> Bool[Tensor, "B Q K"]:
    """The same where the target's KV stands for the verified tokens; K = P + (step + 1) * Q.

    Input i is (token i + 1, features of token i): it sees the target's KV of tokens 0..i and its
    own chain, the input of step 0 included.
    """
    rows = torch.arange(max_inputs, device=num_inputs.device)
    slots = torch.arange(max_context, device=num_inputs.device)
    context = (slots <= rows[:, None]) & (rows[:, None] < num_inputs[:, None, None])
    chains = [_own_chain(num_inputs, max_inputs)] * (step + 1)
    return torch.cat([context, *chains], dim=-1)


def _own_chain(num_inputs: Int[Tensor, " B"], max_inputs: int) -> Bool[Tensor, "B Q Q"]:
    rows = torch.arange(max_inputs, device=num_inputs.device)
    return (rows == rows[:, None]) & (rows < num_inputs[:, None, None])
