"""Triton twin of `reference.move_kv`: one program per request, pool and part of a row, one launch.

Rows are copied as words, whatever the dtype. Pools of a kind (row length, distance of rows, device)
share a launch through a table of their addresses, which is made when they are first seen: outside
of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from specstack_kernels.aot import AotCase

MAX_WORDS = 256
"""Of a row, per program."""
STEPS = 16
"""Path nodes whose words are in registers at a time."""
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""By size in bytes."""


@triton.jit
def _move_kv_kernel(
    addresses,  # [pools]
    window,  # [B, N]
    accept_index,  # [B, K]
    nodes,
    width,
    row_words,
    row_stride,
    WORD: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    pool = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(WORD))
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    window += request * nodes
    accept_index += request * width
    # A later source lies behind all earlier targets, see the definition: only within a group of
    # steps must all sources be read first.
    for start in range(0, width, STEPS):
        step = start + tl.arange(0, STEPS)
        node = tl.load(accept_index + step, mask=step < width, other=-1)
        # Where a path is the window's front, it stays.
        moves = node > step
        source = tl.load(window + node, mask=moves, other=0).to(tl.int64)
        target = tl.load(window + step, mask=moves, other=0).to(tl.int64)
        mask = moves[:, None] & (word < row_words)[None, :]
        words = tl.load(pool + source[:, None] * row_stride + word[None, :], mask=mask)
        # Another thread may write what this one has yet to read.
        tl.debug_barrier()
        tl.store(pool + target[:, None] * row_stride + word[None, :], words, mask=mask)


class _Kind(NamedTuple):
    """What pools that share a launch have in common."""

    device: torch.device
    row_bytes: int
    stride_bytes: int
    word_bytes: int


class _Launch(NamedTuple):
    """Pools of one kind."""

    kind: _Kind
    addresses: Int[Tensor, " pools"]


def move_kv(
    pools: Sequence[Tensor], window: Int[Tensor, "B N"], accept_index: Int[Tensor, "B K"]
) -> None:
    """Move rows of every pool in place. Host sync: none, but when pools are first seen.

    Args:
        pools: [S ..], one row per slot, rows contiguous: keys or values of a layer.
        window: slots; no slot stands twice.
        accept_index: node ids, rising; -1 moves nothing.
    """
    batch, nodes = window.shape
    width = accept_index.shape[1]
    if batch == 0:
        return
    window, accept_index = window.contiguous(), accept_index.contiguous()
    seen = tuple((pool.data_ptr(), pool.shape, pool.stride(), pool.dtype) for pool in pools)
    for kind, addresses in _launches(seen, window.device):
        row_words = kind.row_bytes // kind.word_bytes
        block_words = min(MAX_WORDS, triton.next_power_of_2(row_words))
        _move_kv_kernel[(batch, len(addresses), triton.cdiv(row_words, block_words))](
            addresses,
            window,
            accept_index,
            nodes,
            width,
            row_words,
            kind.stride_bytes // kind.word_bytes,
            WORD=WORDS[kind.word_bytes],
            BLOCK_WORDS=block_words,
            STEPS=min(STEPS, triton.next_power_of_2(width)),
        )


@lru_cache(maxsize=64)
def _launches(
    pools: tuple[tuple[int, torch.Size, tuple[int, ...], torch.dtype], ...], device: torch.device
) -> list[_Launch]:
    """Tables of addresses on the device. Nothing here outlives the pools but their addresses."""
    kinds: dict[_Kind, list[int]] = {}
    for address, shape, stride, dtype in pools:
        kinds.setdefault(_kind(address, shape, stride, dtype, device), []).append(address)
    return [
        _Launch(kind, torch.tensor(addresses, dtype=torch.int64).to(device))
        for kind, addresses in kinds.items()
    ]


def _kind(
    address: int,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> _Kind:
    row_elements = 1
    for size, step in zip(reversed(shape[1:]), reversed(stride[1:]), strict=True):
        assert step == row_elements or size == 1, f"rows of shape {shape}, strides {stride}"
        row_elements *= size
    row_bytes, stride_bytes = row_elements * dtype.itemsize, stride[0] * dtype.itemsize
    word_bytes = next(
        size
        for size in WORDS
        if address % size == 0 and row_bytes % size == 0 and stride_bytes % size == 0
    )
    return _Kind(device, row_bytes, stride_bytes, word_bytes)


def aot_cases() -> list[AotCase]:
    """Rows of Qwen3-8B's keys in bfloat16, 2048 bytes, and of an odd size."""
    signature = {
        **dict.fromkeys(("addresses", "window", "accept_index"), "*i64"),
        **dict.fromkeys(("nodes", "width", "row_words", "row_stride"), "i32"),
    }
    return [
        AotCase(
            name=f"move_kv {bytes_}-byte words",
            kernel=_move_kv_kernel,
            signature=signature,
            constexprs={"WORD": WORDS[bytes_], "BLOCK_WORDS": MAX_WORDS, "STEPS": STEPS},
        )
        for bytes_ in (8, 1)
    ]
