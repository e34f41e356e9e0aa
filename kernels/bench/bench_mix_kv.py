"""Times of `mix_kv`: the committed tokens of a round, and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import QWEN3_8B, BenchCase, sizes

from specstack_kernels import ops
from specstack_kernels.testing_rows import random_rows
from specstack_kernels.torch_ops.mix_kv import mix_kv as torch_form

LAYERS, TAPS = 1, 3
COMMITTED = 8
"""Rows of a request and round, live or not."""


def cases(device: torch.device) -> Iterator[BenchCase]:
    """T = B * COMMITTED of a round and T of a prompt, at the sizes of Qwen3-8B."""
    batches, _, contexts = sizes(device)
    for num_tokens in (*(COMMITTED * batch for batch in batches), *contexts):
        for is_derotated in (False, True):
            yield _case(num_tokens, is_derotated, device)


def _case(num_tokens: int, is_derotated: bool, device: torch.device) -> BenchCase:
    heads, head_dim = QWEN3_8B["kv_heads"], QWEN3_8B["head_dim"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = random_rows(num_tokens, LAYERS, heads, head_dim, dtype, kept=1.0).to(device)
    keys, values = torch.randn(2, num_tokens, TAPS, heads, head_dim, device=device).to(dtype)
    width = heads * head_dim
    mixes = torch.randn(2, LAYERS, width, TAPS * width, device=device) / (TAPS * width) ** 0.5
    inputs = (keys, values, *mixes.to(dtype))
    written = 2 * num_tokens * LAYERS * width * dtype.itemsize
    kind = "derotated" if is_derotated else "linear"
    return BenchCase(
        op="mix_kv",
        shape=f"{kind} T{num_tokens} m{TAPS} n{LAYERS} G{heads} C{head_dim}",
        run=partial(ops.mix_kv, *inputs, *rows, is_derotated=is_derotated),
        num_bytes=written + sum(x.nbytes for x in (*inputs, *rows[:4])),
        rivals={"torch": partial(torch_form, *inputs, *rows, is_derotated=is_derotated)},
        num_flops=4 * num_tokens * mixes[0].numel(),
    )
