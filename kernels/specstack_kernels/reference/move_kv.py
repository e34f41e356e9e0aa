"""The KV of accepted paths moves to the front of each request's verify window: the definition.

A verify step writes the KV of node n of request b to slot window[b, n]. What follows reads a
request's committed tokens from window[b, 0], window[b, 1], ..., so that the k-th node of the path
moves there. Every source is read before any slot is written. Moving in the order k = 0, 1, ...
does the same: node ids rise along a path, so accept_index[b, k] >= k, and a later source lies
behind all slots that are written before; requests share no slot. Letters: B requests, N nodes,
K path width, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor


def move_kv(
    pools: Sequence[Tensor], window: Int[Tensor, "B N"], accept_index: Int[Tensor, "B K"]
) -> None:
    """Move rows of every pool in place.

    Args:
        pools: [S ..], one row per slot: keys or values of a layer.
        window: slots; no slot stands twice.
        accept_index: node ids, rising; -1 moves nothing.
    """
    batch, width = accept_index.shape
    moves = [
        (int(window[b, k]), int(window[b, accept_index[b, k]]))
        for b in range(batch)
        for k in range(width)
        if accept_index[b, k] >= 0
    ]
    for pool in pools:
        rows = [pool[source].clone() for _, source in moves]
        for (target, _), row in zip(moves, rows, strict=True):
            pool[target] = row
