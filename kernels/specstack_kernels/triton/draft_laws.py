"""What rules for drawn drafts compute of the two laws of a node, p and q, without laying q out.

p stands as logits and filters (`triton.filter_probs`): its weights are in (0, 1], their sum is its
mass. q stands as candidates in any order. What is left of p is (keep p - reach q)+, `reach` in
weights per probability.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specstack_kernels.aot import AotCase
from specstack_kernels.triton.filter_probs import is_kept, load_weights
from specstack_kernels.triton.sample_and_walk import draw

LAST_UNIFORM = tl.constexpr(1.0 - 2.0**-53)
MAX_PAIRS = 4096
"""Candidates times nodes that are compared at once."""


@triton.jit
def kept_weight(row, token, is_real, largest, scale, cut, last_tied):
    """Weights of some tokens, 0 where the filters drop them, float64."""
    logit = tl.load(row + token, mask=is_real, other=-float("inf")).to(tl.float32)
    weight = tl.exp2((logit - largest) * scale)
    return tl.where(is_kept(weight, token, cut, last_tied) & is_real, weight, 0.0).to(tl.float64)


@triton.jit
def left_at_candidates(
    row, law_tokens, law_probs, candidates, largest, scale, cut, last_tied, keep, reach, out,
    BLOCK_C: tl.constexpr, IS_STORED: tl.constexpr,
):  # fmt: skip
    """Sum of (keep * weight - reach * q)+ over the candidates; stored at their tokens if asked."""
    total = tl.zeros([BLOCK_C], tl.float64)
    for start in range(0, candidates, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        is_real = column < candidates
        token = tl.load(law_tokens + column, mask=is_real, other=0)
        q = tl.load(law_probs + column, mask=is_real, other=0.0).to(tl.float64)
        weight = kept_weight(row, token, is_real, largest, scale, cut, last_tied)
        left = tl.maximum(keep * weight - reach * q, 0.0)
        if IS_STORED:
            # What is stored is float32, so its sum is of what was stored.
            left = left.to(tl.float32).to(tl.float64)
            tl.store(out + token, left.to(tl.float32), mask=is_real)
        total += tl.where(is_real, left, 0.0)
    return tl.sum(total)


@triton.jit
def store_kept(row, vocab, largest, scale, cut, last_tied, keep, out, BLOCK: tl.constexpr):
    """Store `keep` times the surviving weights of a row."""
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        weight = load_weights(row, column, vocab, largest, scale, True)
        weight = tl.where(is_kept(weight, column, cut, last_tied), weight, 0.0)
        tl.store(out + column, (keep * weight).to(tl.float32), mask=column < vocab)


@triton.jit
def draw_left(
    row, law_tokens, law_probs, candidates, vocab, largest, scale, cut, last_tied, mass, keep,
    reach, uniform, out, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Draw from (keep * weight - reach * q)+, or from the weights if that is zero everywhere.

    The first is laid out in `out`, [V], as the candidates stand in any order. `reach` 0: the law is
    not read.
    """
    total = tl.zeros([], tl.float64)
    if reach > 0:
        tl.debug_barrier()  # an earlier draw may still be read
        store_kept(row, vocab, largest, scale, cut, last_tied, keep, out, BLOCK)
        tl.debug_barrier()
        left_at_candidates(
            row, law_tokens, law_probs, candidates, largest, scale, cut, last_tied, keep, reach,
            out, BLOCK_C, True,
        )  # fmt: skip
        tl.debug_barrier()
        sums = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            sums += load_weights(out, column, vocab, 0.0, 1.0, False).to(tl.float64)
        total = tl.sum(sums)
    if total > 0:
        token = draw(out, vocab, 0.0, 1.0, 0, -1, uniform * total, BLOCK, False)
    else:
        token = draw(row, vocab, largest, scale, cut, last_tied, uniform * mass, BLOCK, True)
    return token


def law_block(candidates: int, block_n: int) -> int:
    """Candidates that are compared with all nodes at once."""
    smallest: int = triton.next_power_of_2(max(candidates, 1))
    return min(smallest, max(16, MAX_PAIRS // block_n))


def aot_cases() -> list[AotCase]:
    """None: these are parts of kernels."""
    return []
