"""Brings the KV of accepted paths to the front of their windows.

One launch for all layers where the engine's pool is plain rows; a pool with another layout, or with
scales beside its rows, moves its own. Letters: B requests, N nodes, K path width.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Int
from torch import Tensor

from specstack_kernels.ops import move_kv, path_slots
from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.pool import CpuMHATokenToKVPool

PLAIN_POOLS = (sgl.MHATokenToKVPool, CpuMHATokenToKVPool)


def plain_rows(pool: Any) -> tuple[Tensor, ...] | None:
    """Keys and values of all layers, [slots, heads, size] each; None where there is more to it."""
    buffers = (*pool.k_buffer, *pool.v_buffer)
    has_scales = getattr(pool, "k_scale_buffer", None) is not None
    is_row = all(buffer.ndim == 3 for buffer in buffers)  # other layouts have pages and blocks
    return buffers if type(pool) in PLAIN_POOLS and is_row and not has_scales else None


def move_paths(pool: Any, window: Int[Tensor, "B N"], accept_index: Int[Tensor, "B K"]) -> None:
    """Move path node k of a request to slot k of its window. Host sync: none."""
    rows = plain_rows(pool)
    if rows is not None:
        move_kv(rows, window, accept_index)
        return
    target, source = path_slots(window, accept_index)
    pool.move_kv_cache(target, source)
