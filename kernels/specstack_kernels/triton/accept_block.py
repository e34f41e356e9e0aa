"""Triton twin of `reference.accept_block`: one program per request, filtering every node once.

What survives the filters is found as in `triton.filter_probs`, once more for the node that the last
token is drawn at. Masses are float64, weights float32: borders move by about 1e-7.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.triton.draft_laws import (
    LAST_UNIFORM,
    draw_left,
    kept_weight,
    law_block,
    left_at_candidates,
)
from specstack_kernels.triton.filter_probs import (
    LOG2_E,
    MAX_BLOCK,
    NEVER,
    find_kept,
    row_blocks,
    row_max,
)
from specstack_kernels.types import Walk


@triton.jit
def _law_at(law_tokens, law_probs, candidates, draft, BLOCK_C: tl.constexpr):
    """Returns (mass of q, q of `draft`)."""
    mass = tl.zeros([BLOCK_C], tl.float64)
    own = tl.zeros([BLOCK_C], tl.float64)
    for start in range(0, candidates, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        token = tl.load(law_tokens + column, mask=column < candidates, other=-1)
        q = tl.load(law_probs + column, mask=column < candidates, other=0.0).to(tl.float64)
        mass += q
        own += tl.where(token == draft, q, 0.0)
    return tl.sum(mass), tl.sum(own)


@triton.jit
def _judge(
    row, law_tokens, law_probs, candidates, draft, largest, scale, cut, last_tied, mass, kept,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Returns (is the draft possible, chance that the prefix ends here, how much of it is kept).

    The chance is h of the prefix before the draft, the last k of the prefix with it.
    """
    q_mass, q = _law_at(law_tokens, law_probs, candidates, draft, BLOCK_C)
    total = mass.to(tl.float64)
    chance = tl.zeros([], tl.float64)
    longer = tl.zeros([], tl.float64)
    if q > 0:
        inside = left_at_candidates(
            row, law_tokens, law_probs, candidates, largest, scale, cut, last_tied, 1.0, 0.0, row,
            BLOCK_C, False,
        )  # fmt: skip
        left = left_at_candidates(
            row, law_tokens, law_probs, candidates, largest, scale, cut, last_tied, kept,
            total / q_mass, row, BLOCK_C, False,
        )  # fmt: skip
        left = (left + kept * tl.maximum(total - inside, 0.0)) / total
        if left > 0:
            chance = left / (left + (1.0 - kept))
        weight = kept_weight(row, draft, draft >= 0, largest, scale, cut, last_tied)
        longer = tl.minimum(kept * (weight / total) * (q_mass / q), 1.0)
    return q > 0, chance, longer


@triton.jit
def _accept_block_kernel(
    draft_tokens,  # [B, N]
    num_nodes,  # [B]
    law_tokens,  # [B, N, C]
    law_probs,  # [B, N, C]
    logits,  # [T, V]
    logit_rows,  # [B, N]
    temperature,  # [B]
    top_k,  # [B]
    top_p,  # [B]
    min_p,  # [B]
    uniforms,  # [B, K]
    accept_index,  # [B, K]
    accept_lens,  # [B]
    emitted,  # [B, K]
    scratch,  # [B, V]
    nodes,
    candidates,
    width,
    vocab,
    row_stride,
    uniform_stride,
    USE_TOP_K_TOP_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    scale = LOG2_E / tl.load(temperature + request)
    floor = tl.load(min_p + request)
    given_k = tl.load(top_k + request)
    k = tl.full([], NEVER, tl.int32)
    p = tl.full([], 1.0, tl.float32)
    if USE_TOP_K_TOP_P:
        k = tl.minimum(given_k, NEVER).to(tl.int32)
        p = tl.load(top_p + request)

    at_node = request * nodes
    step = tl.arange(0, BLOCK_K)
    most = tl.minimum(tl.minimum(tl.load(num_nodes + request), nodes), width) - 1
    num_drafts = tl.zeros([], tl.int64)
    kept = tl.full([], 1.0, tl.float64)
    all_kept = tl.where(step == 0, 1.0, tl.zeros([BLOCK_K], tl.float64))
    chances = tl.zeros([BLOCK_K], tl.float64)
    is_open = most > 0
    while is_open:
        row = logits + tl.load(logit_rows + at_node + num_drafts).to(tl.int64) * row_stride
        draft = tl.load(draft_tokens + at_node + num_drafts + 1)
        largest, best = row_max(row, vocab, BLOCK)
        is_possible = True
        chance = kept
        if given_k == 1:
            kept = tl.where(draft == best, 1.0, 0.0).to(tl.float64)
        else:
            cut, last_tied, mass = find_kept(row, vocab, largest, scale, k, p, floor, BLOCK)
            law = (at_node + num_drafts) * candidates
            is_possible, chance, kept = _judge(
                row, law_tokens + law, law_probs + law, candidates, draft, largest, scale, cut,
                last_tied, mass, kept, BLOCK_C,
            )  # fmt: skip
        if is_possible:
            chances = tl.where(step == num_drafts, chance, chances)
            num_drafts += 1
            chances = tl.where(step == num_drafts, kept, chances)
            all_kept = tl.where(step == num_drafts, kept, all_kept)
        is_open = is_possible & (kept > 0) & (num_drafts < most)

    uniform = tl.load(uniforms + request * uniform_stride).to(tl.float64)
    uniform = tl.where(given_k == 1, 0.0, tl.minimum(uniform, LAST_UNIFORM))
    length = num_drafts
    has_passed = tl.zeros([], tl.int1)
    while (length > 0) & (has_passed == 0):
        chance = tl.sum(tl.where(step == length, chances, 0.0))
        has_passed = uniform < chance
        if has_passed:
            uniform = tl.minimum(uniform / chance, LAST_UNIFORM)
        else:
            uniform = tl.minimum((uniform - chance) / (1.0 - chance), LAST_UNIFORM)
            length -= 1

    row = logits + tl.load(logit_rows + at_node + length).to(tl.int64) * row_stride
    largest, token = row_max(row, vocab, BLOCK)
    if given_k != 1:
        cut, last_tied, mass = find_kept(row, vocab, largest, scale, k, p, floor, BLOCK)
        law = (at_node + length) * candidates
        reach = tl.zeros([], tl.float64)
        if length < num_drafts:
            q_mass, _ = _law_at(law_tokens + law, law_probs + law, candidates, -1, BLOCK_C)
            reach = mass.to(tl.float64) / q_mass
        kept = tl.sum(tl.where(step == length, all_kept, 0.0))
        token = draw_left(
            row, law_tokens + law, law_probs + law, candidates, vocab, largest, scale, cut,
            last_tied, mass, kept, reach, uniform, scratch + request * vocab, BLOCK, BLOCK_C,
        )  # fmt: skip

    out = request * width
    draft = tl.load(draft_tokens + at_node + step + 1, mask=step < length, other=0)
    draft = tl.where(step == length, token.to(tl.int64), draft)
    tl.store(emitted + out + step, draft, mask=step < width)
    tl.store(accept_index + out + step, tl.where(step <= length, step, -1), mask=step < width)
    tl.store(accept_lens + request, length + 1)


def accept_block(
    draft_tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    law_tokens: Int[Tensor, "B N C"],
    law_probs: Float[Tensor, "B N C"],
    logits: Float[Tensor, "T V"],
    logit_rows: Int[Tensor, "B N"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    uniforms: Float[Tensor, "B K"],
    *,
    max_depth: int,
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted prefix of each chain; K = max_depth + 1. Host sync: none.

    Args:
        law_tokens: distinct in a node that has a child, anything in others.
        law_probs: q of each candidate; anything in nodes without a child.
        logits: bfloat16 and float16 are read as float32.
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first; no law and no uniform counts.
        uniforms: the first of each request counts.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    batch, nodes = draft_tokens.shape
    device, width, vocab = draft_tokens.device, max_depth + 1, logits.shape[1]
    walk = Walk.unwritten(batch, width, device)
    if batch == 0:
        return walk
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    _accept_block_kernel[(batch,)](
        *(tensor.contiguous() for tensor in (draft_tokens, num_nodes, law_tokens, law_probs)),
        logits,
        *(tensor.contiguous() for tensor in (logit_rows, temperature, top_k, top_p, min_p)),
        uniforms,
        walk.accept_index,
        walk.accept_lens,
        walk.emitted,
        torch.empty((batch, vocab), dtype=torch.float32, device=device),
        nodes,
        law_tokens.shape[2],
        width,
        vocab,
        logits.stride(0),
        uniforms.stride(0),
        USE_TOP_K_TOP_P=use_top_k_top_p,
        BLOCK_C=law_block(law_tokens.shape[2], 1),
        BLOCK_K=triton.next_power_of_2(width),
        **row_blocks(vocab),
    )
    return walk


def aot_cases() -> list[AotCase]:
    """Qwen3's vocabulary; laws of 64 candidates and of all tokens."""
    numbers = "draft_tokens num_nodes law_tokens logit_rows top_k accept_index accept_lens emitted"
    sizes = "nodes candidates width vocab row_stride uniform_stride"
    signature = {
        **dict.fromkeys(numbers.split(), "*i64"),
        **dict.fromkeys(["law_probs", "temperature", "top_p", "min_p", "scratch"], "*fp32"),
        **dict.fromkeys(sizes.split(), "i32"),
        "uniforms": "*fp64",
    }
    return [
        AotCase(
            name=f"accept_block {dtype} C{candidates} {filters}",
            kernel=_accept_block_kernel,
            signature={**signature, "logits": f"*{dtype}"},
            constexprs={
                "USE_TOP_K_TOP_P": filters == "top-k top-p",
                "BLOCK_C": law_block(candidates, 1),
                "BLOCK_K": 16,
                "BLOCK": MAX_BLOCK,
            },
            num_warps=16,
        )
        for dtype, candidates, filters in (
            ("bf16", 64, "plain"),
            ("bf16", 64, "top-k top-p"),
            ("fp32", 151936, "top-k top-p"),
        )
    ]
