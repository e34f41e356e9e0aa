"""Times of `sum_kv`: the committed tokens of a round, and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import QWEN3_8B, BenchCase, sizes

from specstack_kernels import ops
from specstack_kernels.testing_rows import random_rows
from specstack_kernels.torch_ops.sum_kv import sum_kv as torch_form

LAYERS, RANKS = 2, (0, 64)
COMMITTED = 8
"""Rows of a request and round, live or not."""


def cases(device: torch.device) -> Iterator[BenchCase]:
    """T = B * COMMITTED of a round and T of a prompt; rank 0 is diagonal."""
    batches, _, contexts = sizes(device)
    for num_tokens in (*(COMMITTED * batch for batch in batches), *contexts):
        for rank in RANKS:
            yield _case(num_tokens, rank, device)


def _case(num_tokens: int, rank: int, device: torch.device) -> BenchCase:
    heads, head_dim = QWEN3_8B["kv_heads"], QWEN3_8B["head_dim"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = random_rows(num_tokens, LAYERS, heads, head_dim, dtype, kept=1.0).to(device)
    keys, values = torch.randn(2, num_tokens, LAYERS, heads, head_dim, device=device).to(dtype)
    width = heads * head_dim
    downs, up_size = (None, None), (LAYERS, width)
    if rank:
        downs = (torch.randn(2, LAYERS, rank, width, device=device) / width**0.5).to(dtype)
        up_size = (LAYERS, width, rank)
    # Small, as the pool grows with every call.
    inputs = (keys, values, *downs, *(1e-3 * torch.randn(2, *up_size, device=device)).to(dtype))
    added = 4 * num_tokens * LAYERS * width * dtype.itemsize  # read and written
    return BenchCase(
        op="sum_kv",
        shape=f"rank{rank} T{num_tokens} n{LAYERS} G{heads} C{head_dim}",
        run=partial(ops.sum_kv, *inputs, *rows),
        num_bytes=added + sum(x.nbytes for x in (*inputs, *rows[:4]) if x is not None),
        rivals={"torch": partial(torch_form, *inputs, *rows)},
        num_flops=8 * num_tokens * LAYERS * width * rank,
    )
