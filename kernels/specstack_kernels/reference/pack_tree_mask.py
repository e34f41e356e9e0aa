"""The attention mask of a verify step over prefix and tree, packed: the definition.

SGLang's FULL_MASK, which FlashInfer's custom masks use, too: every node has a row of one flag per
key. The committed prefix is seen by all; of the tree a node sees what the tree mask says. Requests
stand one after the other. Letters: B requests, N nodes, T flags of all requests.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack_kernels.types import PackedTreeMask


def pack_tree_mask(
    tree_mask: Bool[Tensor, "B N N"], seq_lens: Int[Tensor, " B"], *, num_tokens: int
) -> PackedTreeMask:
    """Return N rows of seq_len + N flags per request.

    Args:
        num_tokens: the sum of `seq_lens`, which the host knows.
    """
    batch, nodes = tree_mask.shape[:2]
    full = torch.zeros(batch * nodes * nodes + nodes * num_tokens, dtype=torch.bool)
    offsets = torch.zeros(batch + 1, dtype=torch.int64)
    place = 0
    for b in range(batch):
        for node in range(nodes):
            for _ in range(int(seq_lens[b])):
                full[place] = True
                place += 1
            for other in range(nodes):
                full[place] = tree_mask[b, node, other]
                place += 1
        offsets[b + 1] = place
    assert place == len(full), f"{num_tokens} tokens are not the sum of seq_lens"
    return PackedTreeMask(full, offsets)
