"""Vectorised twin of `reference.pack_tree_mask`: sets all flags, then puts the trees in place."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack_kernels.types import PackedTreeMask


def pack_tree_mask(
    tree_mask: Bool[Tensor, "B N N"], seq_lens: Int[Tensor, " B"], *, num_tokens: int
) -> PackedTreeMask:
    """Return N rows of seq_len + N flags per request. Host sync: none.

    Args:
        num_tokens: the sum of `seq_lens`, which the host knows.
    """
    batch, nodes = tree_mask.shape[:2]
    device = tree_mask.device
    row_lens = seq_lens.to(torch.int64) + nodes
    offsets = pad((row_lens * nodes).cumsum(0), (1, 0))
    node = torch.arange(nodes, device=device)
    row_ends = offsets[:-1, None] + row_lens[:, None] * (node + 1)  # [B, N]
    place = row_ends[:, :, None] - nodes + node  # [B, N, N]
    size = batch * nodes * nodes + nodes * num_tokens
    full = torch.ones(size, dtype=torch.bool, device=device)
    full.scatter_(0, place.flatten(), tree_mask.flatten())
    return PackedTreeMask(full, offsets)
