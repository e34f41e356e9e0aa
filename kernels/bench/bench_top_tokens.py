"""Times of `top_tokens` beside log_softmax and torch.topk, whose ties are in any order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from harness import QWEN3_8B, BenchCase, sizes
from torch import Tensor

from specstack_kernels import ops
from specstack_kernels.torch_ops.top_tokens import top_tokens as torch_form

SLOTS = 15
"""Rows of a request: a block of 16 without its anchor."""
DRAFT_VOCAB = 32_000


def cases(device: torch.device) -> Iterator[BenchCase]:
    """The target's vocabulary and a draft vocabulary."""
    batches, _, _ = sizes(device)
    for batch, vocab in product(batches, (DRAFT_VOCAB, QWEN3_8B["vocab"])):
        for k in (8, 64):
            yield _case(batch * SLOTS, vocab, k, device)


def _case(rows: int, vocab: int, k: int, device: torch.device) -> BenchCase:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn((rows, vocab), device=device, dtype=dtype) * 3
    return BenchCase(
        op="top_tokens",
        shape=f"R{rows} V{vocab} k{k}",
        run=partial(ops.top_tokens, logits, k),
        num_bytes=logits.nbytes + 12 * rows * k,
        rivals={
            "torch": partial(torch_form, logits, k),
            "torch.topk": partial(_topk, logits, k),
        },
    )


def _topk(logits: Tensor, k: int) -> object:
    return logits.float().log_softmax(dim=-1).topk(k, dim=-1)
