"""Triton twin of `reference.top_tokens`: one program per row and block, then one per row to merge.

The first launch streams the logits once: maxima of chunks, and sums for the logsumexp. As in
`torch_ops`, the k best tokens lie in the k best chunks, so the second launch picks k chunks among
all, then k tokens in those, one by one: keys are distinct whole numbers (the logit above, the
column below), so the next one is the largest key below the last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.torch_ops.top_tokens import top_tokens as sort_tokens
from specstack_kernels.types import TopTokens

BLOCK = 4096
"""Columns per program of the first launch."""
MAX_KEYS = 16384
"""In the registers of a program of the second launch."""
CHUNKS = (16, 32, 64, 128, 256)
NO_KEY = tl.constexpr(-(1 << 63))
COLUMN_MASK = tl.constexpr((1 << 32) - 1)


@triton.jit
def _scan_blocks_kernel(
    logits,  # [R, V]
    chunk_max,  # [R, chunks]
    block_max,  # [R, blocks]
    block_sum,  # [R, blocks]
    vocab,
    row_stride,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    chunk = block * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
    column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = logits + row * row_stride + column
    values = tl.load(values, mask=column < vocab, other=-float("inf")).to(tl.float32)
    maxima = tl.max(values, axis=1)
    tl.store(chunk_max + row * num_chunks + chunk, maxima, mask=chunk < num_chunks)
    largest = tl.max(maxima)
    weights = tl.exp(values - tl.where(largest == -float("inf"), 0.0, largest))
    total = tl.sum(tl.sum(weights, axis=1))
    out = row * tl.num_programs(1) + block
    tl.store(block_max + out, largest)
    tl.store(block_sum + out, total)


@triton.jit
def _keys(values, columns, is_valid):
    """Whole numbers that rise with the value, then fall with the column; never twice the same."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 has other bits
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = (rising << 32) | (COLUMN_MASK - columns.to(tl.int64))
    return tl.where(is_valid, keys, NO_KEY)


@triton.jit
def _pick(keys, k, axis_size: tl.constexpr):
    """Columns of the k largest keys, largest first, in a vector; -1 where there are none left."""
    slot = tl.arange(0, axis_size)
    picked = tl.full([axis_size], -1, tl.int64)
    last = tl.max(keys)
    for i in range(k):
        column = tl.where(last == NO_KEY, -1, COLUMN_MASK - (last & COLUMN_MASK))
        picked = tl.where(slot == i, column, picked)
        last = tl.max(tl.where(keys < last, keys, NO_KEY))
    return picked


@triton.jit
def _pick_tokens_kernel(
    logits,  # [R, V]
    chunk_max,  # [R, chunks]
    block_max,  # [R, blocks]
    block_sum,  # [R, blocks]
    token_ids,  # [V] or None
    tokens,  # [R, k]
    log_probs,  # [R, k]
    vocab,
    row_stride,
    num_chunks,
    num_blocks,
    k,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PADDED)
    is_chunk = chunk < num_chunks
    maxima = tl.load(chunk_max + row * num_chunks + chunk, mask=is_chunk, other=0.0)
    chosen = _pick(_keys(maxima, chunk, is_chunk), k, K_PADDED)

    column = chosen[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]  # [K, CHUNK]
    is_column = (chosen >= 0)[:, None] & (column < vocab)
    logits += row * row_stride
    values = tl.load(logits + column, mask=is_column, other=0.0).to(tl.float32)
    best = _pick(tl.ravel(_keys(values, column, is_column)), k, K_PADDED)

    block = tl.arange(0, BLOCKS_PADDED)
    blocks = row * num_blocks + block
    largest = tl.load(block_max + blocks, mask=block < num_blocks, other=-float("inf"))
    sums = tl.load(block_sum + blocks, mask=block < num_blocks, other=0.0)
    most = tl.max(largest)
    total = tl.sum(sums * tl.exp(largest - most))

    slot = tl.arange(0, K_PADDED)
    is_out = slot < k
    value = tl.load(logits + best, mask=is_out, other=0.0).to(tl.float32)
    tl.store(log_probs + row * k + slot, value - most - tl.log(total), mask=is_out)
    if token_ids is not None:
        best = tl.load(token_ids + best, mask=is_out, other=0).to(tl.int64)
    tl.store(tokens + row * k + slot, best, mask=is_out)


def top_tokens(
    logits: Float[Tensor, "R V"], k: int, *, token_ids: Int[Tensor, " V"] | None = None
) -> TopTokens:
    """Return the k <= V largest log-softmax values of each row, best first. Host sync: none.

    Where the keys exceed a program's registers (k > 1024 at V = 151,936), `torch_ops` sorts them.

    Args:
        token_ids: of each column; None: the column itself.
    """
    rows, vocab = logits.shape
    assert 0 < k <= vocab, f"the {k} best of {vocab}"
    if (chunk := _chunk(vocab, k)) is None:
        return sort_tokens(logits, k, token_ids=token_ids)
    device = logits.device
    found = TopTokens(
        torch.empty((rows, k), dtype=torch.int64, device=device),
        torch.empty((rows, k), dtype=torch.float32, device=device),
    )
    if rows == 0:
        return found
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_chunks, num_blocks = triton.cdiv(vocab, chunk), triton.cdiv(vocab, BLOCK)
    scanned = [
        torch.empty((rows, size), dtype=torch.float32, device=device)
        for size in (num_chunks, num_blocks, num_blocks)
    ]
    sizes = (vocab, logits.stride(0), num_chunks)
    _scan_blocks_kernel[(rows, num_blocks)](logits, *scanned, *sizes, CHUNK=chunk, BLOCK=BLOCK)
    _pick_tokens_kernel[(rows,)](
        logits,
        *scanned,
        None if token_ids is None else token_ids.contiguous(),
        *found,
        *sizes,
        num_blocks,
        k,
        **_pick_blocks(vocab, k, chunk),
    )
    return found


def _chunk(vocab: int, k: int) -> int | None:
    """Columns per chunk that leave the fewest keys to look at, or None if those are too many."""
    keys = {chunk: _num_keys(vocab, k, chunk) for chunk in CHUNKS}
    fitting = [chunk for chunk in CHUNKS if max(keys[chunk]) <= MAX_KEYS]
    return min(fitting, key=lambda chunk: sum(keys[chunk]), default=None)


def _num_keys(vocab: int, k: int, chunk: int) -> tuple[int, int]:
    """Of chunks, then of tokens."""
    num_chunks = triton.next_power_of_2(triton.cdiv(vocab, chunk))
    return num_chunks, triton.next_power_of_2(k) * chunk


def _pick_blocks(vocab: int, k: int, chunk: int) -> dict[str, int]:
    num_keys = _num_keys(vocab, k, chunk)
    return {
        "CHUNK": chunk,
        "CHUNKS_PADDED": num_keys[0],
        "BLOCKS_PADDED": triton.next_power_of_2(triton.cdiv(vocab, BLOCK)),
        "K_PADDED": triton.next_power_of_2(k),
        "num_warps": min(16, max(1, max(num_keys) // 512)),
    }


def aot_cases() -> list[AotCase]:
    """Qwen3's vocabulary, and 32000 draft tokens with ids."""
    scanned = dict.fromkeys(("chunk_max", "block_max", "block_sum"), "*fp32")
    sizes = dict.fromkeys(("vocab", "row_stride", "num_chunks"), "i32")
    cases = []
    for dtype, vocab, k in (("bf16", 151936, 16), ("fp32", 151936, 64), ("bf16", 32000, 8)):
        chunk = _chunk(vocab, k)
        assert chunk is not None
        blocks = _pick_blocks(vocab, k, chunk)
        num_warps = blocks.pop("num_warps")
        inputs = {"logits": f"*{dtype}", **scanned, **sizes}
        name = f"V{vocab} k{k} {dtype}"
        scan_blocks = {"CHUNK": chunk, "BLOCK": BLOCK}
        cases.append(AotCase(f"top_tokens scan {name}", _scan_blocks_kernel, inputs, scan_blocks))
        outputs = {"token_ids": "*i64", "tokens": "*i64", "log_probs": "*fp32", "num_blocks": "i32",
                   "k": "i32"}  # fmt: skip
        signature = {**inputs, **outputs}
        cases.append(
            AotCase(f"top_tokens pick {name}", _pick_tokens_kernel, signature, blocks, num_warps)
        )
    return cases
