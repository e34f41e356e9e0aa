"""Triton twin of `reference.draft_attention`: one program per (query rows of a KV head, split).

All H / G query heads of a KV head share the rows of a program, so the context is read once per
block of query rows. Splits of the context (flash decoding) are merged by a second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase

LOG2_E = 1.4426950408889634
TARGET_PROGRAMS = 256
"""About two per streaming multiprocessor of an H100 (132) or B200 (148)."""
MAX_SPLITS = 64
MIN_SPLIT_COLUMNS = 256
"""Context columns that pay for a program."""


@triton.jit
def _attend(queries, keys, values, sees, highest, total, output, scale):
    """Online softmax over one tile of columns, in powers of two."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(sees, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # A row that has seen nothing yet keeps -inf, and -inf - -inf is NaN.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    decay = tl.exp2(highest - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    output = output * decay[:, None]
    output = tl.dot(weights.to(values.dtype), values, output, input_precision="ieee")
    return new_highest, total, output


@triton.jit
def _draft_attention_kernel(
    queries_ptr,  # [B, Q, H, C]
    pool_keys_ptr,  # [S, G, C], strided
    pool_values_ptr,
    kv_slots_ptr,  # [B, L], rows strided
    seq_lens_ptr,  # [B]
    keys_ptr,  # [B, Q, G, C]
    values_ptr,
    mask_ptr,  # [B, Q, Q]
    output_ptr,  # [B, Q, H, C]
    partial_ptr,  # [B, Q, H, SPLITS, C], where SPLITS > 1
    log_total_ptr,  # [B, Q, H, SPLITS], likewise: log2 of the sum of exponentials
    num_queries,
    num_columns,
    slots_stride,
    scale,  # times log2(e)
    KEYS_ROW: tl.constexpr,
    KEYS_HEAD: tl.constexpr,
    VALUES_ROW: tl.constexpr,
    VALUES_HEAD: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = (tl.program_id(1) // G).to(tl.int64)
    g = tl.program_id(1) % G
    split = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # q * GROUP + head of the group
    q = row // GROUP
    is_row = q < num_queries
    c = tl.arange(0, BLOCK_C)
    is_c = c < C
    # Offsets fit 32 bits within a request, not in the batch.
    before = b * num_queries  # slots of the requests before
    head = q * (G * GROUP) + g * GROUP + row % GROUP  # of [Q * H]
    at = head[:, None] * C + c
    is_query = is_row[:, None] & is_c
    queries = tl.load(queries_ptr + before * (G * GROUP * C) + at, mask=is_query, other=0.0)

    highest = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    output = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)

    length = tl.minimum(tl.load(seq_lens_ptr + b), num_columns).to(tl.int32)
    span = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    end = tl.minimum((split + 1) * span, length)
    for first in range(split * span, end, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        is_live = column < end
        slot = tl.load(kv_slots_ptr + b * slots_stride + column, mask=is_live, other=0)
        slot = slot.to(tl.int64)[:, None]
        is_seen = is_live[:, None] & is_c
        keys_at = pool_keys_ptr + slot * KEYS_ROW + g * KEYS_HEAD + c
        values_at = pool_values_ptr + slot * VALUES_ROW + g * VALUES_HEAD + c
        keys = tl.load(keys_at, mask=is_seen, other=0.0)
        values = tl.load(values_at, mask=is_seen, other=0.0)
        sees = is_live[None, :]
        highest, total, output = _attend(queries, keys, values, sees, highest, total, output, scale)

    if split == SPLITS - 1:
        # Not pipelined, and narrow: its tiles would push those of the long loop out of registers.
        for first in tl.range(0, num_queries, BLOCK_OWN, num_stages=1):
            column = first + tl.arange(0, BLOCK_OWN)
            is_pair = is_row[:, None] & (column < num_queries)
            mask_at = mask_ptr + before * num_queries + (q[:, None] * num_queries + column)
            sees = tl.load(mask_at, mask=is_pair, other=0) != 0
            # A weight of zero does not stop a NaN: leave out what no query of these rows sees.
            is_seen = (tl.max(sees.to(tl.int32), axis=0) > 0)[:, None] & is_c
            own_at = before * (G * C) + (column[:, None] * (G * C) + g * C + c)
            keys = tl.load(keys_ptr + own_at, mask=is_seen, other=0.0)
            values = tl.load(values_ptr + own_at, mask=is_seen, other=0.0)
            highest, total, output = _attend(
                queries, keys, values, sees, highest, total, output, scale
            )

    divisor = tl.where(total > 0, total, 1.0)
    output = output / divisor[:, None]
    if SPLITS == 1:
        value = output.to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + before * (G * GROUP * C) + at, value, mask=is_query)
    else:
        part = before * (G * GROUP * SPLITS) + (head * SPLITS + split)
        tl.store(log_total_ptr + part, highest + tl.log2(divisor), mask=is_row)
        # An empty split is not read again.
        is_stored = is_query & (total > 0)[:, None]
        tl.store(partial_ptr + part[:, None] * C + c, output, mask=is_stored)


@triton.jit
def _merge_kernel(
    output_ptr,  # [rows, C]
    partial_ptr,  # [rows, SPLITS, C]
    log_total_ptr,  # [rows, SPLITS]
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    c = tl.arange(0, BLOCK_C)
    at = row * SPLITS + split
    log_total = tl.load(log_total_ptr + at, mask=split < SPLITS, other=float("-inf"))
    highest = tl.max(log_total, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(log_total - shift)
    is_read = (weight > 0)[:, None] & (c < C)
    partial = tl.load(partial_ptr + at[:, None] * C + c, mask=is_read, other=0.0)
    total = tl.sum(weight, axis=0)
    output = tl.sum(partial * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(output_ptr + row * C + c, output.to(output_ptr.dtype.element_ty), mask=c < C)


def draft_attention(
    queries: Float[Tensor, "B Q H C"],
    pool_keys: Float[Tensor, "S G C"],
    pool_values: Float[Tensor, "S G C"],
    kv_slots: Int[Tensor, "B L"],
    seq_lens: Int[Tensor, " B"],
    keys: Float[Tensor, "B Q G C"],
    values: Float[Tensor, "B Q G C"],
    mask: Bool[Tensor, "B Q Q"],
    *,
    scale: float | None = None,
) -> Float[Tensor, "B Q H C"]:
    """As `reference.draft_attention`. Host sync: none."""
    batch, num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_columns = keys.shape[2], kv_slots.shape[1]
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    if pool_keys.stride(-1) != 1 or pool_values.stride(-1) != 1:
        raise ValueError("pool_keys and pool_values need their elements of a head side by side")
    blocks = _blocks(num_queries * group, head_dim, queries.element_size())
    row_blocks = triton.cdiv(num_queries * group, blocks["BLOCK_R"])
    splits = _splits(row_blocks * batch * num_kv_heads, num_columns)
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    partial, log_total = output, output  # not used
    if splits > 1:
        shape = (batch, num_queries, num_heads, splits)
        log_total = torch.empty(shape, dtype=torch.float32, device=queries.device)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=queries.device)
    _draft_attention_kernel[(row_blocks, batch * num_kv_heads, splits)](
        queries.contiguous(), pool_keys, pool_values, kv_slots, seq_lens,
        keys.contiguous(), values.contiguous(), mask.contiguous(), output, partial, log_total,
        num_queries, num_columns, kv_slots.stride(0), scale * LOG2_E,
        KEYS_ROW=pool_keys.stride(0), KEYS_HEAD=pool_keys.stride(1),
        VALUES_ROW=pool_values.stride(0), VALUES_HEAD=pool_values.stride(1),
        G=num_kv_heads, GROUP=group, C=head_dim, SPLITS=splits, **blocks,
        **_schedule(blocks["BLOCK_R"], queries.element_size()),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(batch * num_queries * num_heads,)](
            output, partial, log_total, C=head_dim, SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits), BLOCK_C=blocks["BLOCK_C"],
        )  # fmt: skip
    return output


def _blocks(num_rows: int, head_dim: int, element_size: int) -> dict[str, int]:
    """Tile sizes that fit 100 KiB of shared memory and the registers; float32 is for tests."""
    is_wide = element_size == 4
    return {
        "BLOCK_R": min(max(triton.next_power_of_2(num_rows), 16), 16 if is_wide else 128),
        "BLOCK_N": 32 if is_wide else 64,
        "BLOCK_OWN": 16,
        "BLOCK_C": max(triton.next_power_of_2(head_dim), 16),
    }


def _schedule(block_rows: int, element_size: int) -> dict[str, int]:
    # The third stage is for the slots, whose loads the rows' wait for.
    return {"num_warps": 8 if block_rows >= 128 or element_size == 4 else 4, "num_stages": 3}


def _splits(num_programs: int, num_columns: int) -> int:
    """Parts of the context: enough programs to fill a GPU, from sizes that the host knows."""
    wanted = -(-TARGET_PROGRAMS // num_programs)
    return max(1, min(wanted, -(-num_columns // MIN_SPLIT_COLUMNS), MAX_SPLITS))


def aot_cases() -> list[AotCase]:
    """Blocks of 1, 16 and 256 slots of Qwen3-8B's shape; a head size of 64; float32."""
    shapes = [
        ("bf16", 1, 4, 128, 32), ("bf16", 16, 4, 128, 32), ("bf16", 16, 4, 128, 1),
        ("bf16", 256, 4, 128, 1), ("fp16", 32, 4, 128, 4), ("bf16", 16, 4, 64, 32),
        ("fp32", 16, 4, 128, 4),
    ]  # fmt: skip
    cases = [_attention_case(*shape) for shape in shapes]
    merge = AotCase(
        "draft_attention merge C128 splits32",
        _merge_kernel,
        {"output_ptr": "*bf16", "partial_ptr": "*fp32", "log_total_ptr": "*fp32"},
        {"C": 128, "SPLITS": 32, "BLOCK_S": 32, "BLOCK_C": 128},
    )
    return [*cases, merge]


def _attention_case(dtype: str, queries: int, group: int, head_dim: int, splits: int) -> AotCase:
    size = 4 if dtype == "fp32" else 2
    blocks = _blocks(queries * group, head_dim, size)
    heads, row = {"KEYS_HEAD": head_dim, "VALUES_HEAD": head_dim}, 5 * 2 * 8 * head_dim
    floats = ("queries", "pool_keys", "pool_values", "keys", "values", "output")
    return AotCase(
        f"draft_attention {dtype} Q{queries} C{head_dim} splits{splits}",
        _draft_attention_kernel,
        {
            **{f"{name}_ptr": f"*{dtype}" for name in floats},
            "kv_slots_ptr": "*i64", "seq_lens_ptr": "*i64", "mask_ptr": "*i1",
            "partial_ptr": "*fp32", "log_total_ptr": "*fp32",
            "num_queries": "i32", "num_columns": "i32", "slots_stride": "i32", "scale": "fp32",
        },
        {**heads, "KEYS_ROW": row, "VALUES_ROW": row, "G": 8, "GROUP": group, "C": head_dim,
         "SPLITS": splits, **blocks},
        **_schedule(blocks["BLOCK_R"], size),
    )  # fmt: skip
