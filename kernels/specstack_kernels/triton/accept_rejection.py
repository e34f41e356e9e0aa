"""Triton twin of `reference.accept_rejection`: one program per request, filtering visited nodes.

What survives the filters is found as in `triton.filter_probs`. What is left of p after refusals is
(p - reach q)+ with one number, `reach`, that adds up the ratios of their masses: at refused drafts
it is zero by itself. Masses are float64, weights float32: borders move by about 1e-7.
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
def _law_at(
    law_tokens, law_probs, candidates, draft, draft_tokens, is_refused, BLOCK_C: tl.constexpr
):
    """Returns (mass of q without the refused drafts, q of `draft`)."""
    mass = tl.zeros([BLOCK_C], tl.float64)
    own = tl.zeros([BLOCK_C], tl.float64)
    for start in range(0, candidates, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        is_real = column < candidates
        token = tl.load(law_tokens + column, mask=is_real, other=-1)
        q = tl.load(law_probs + column, mask=is_real, other=0.0).to(tl.float64)
        is_gone = (token[:, None] == draft_tokens[None, :]) & is_refused[None, :]
        mass += tl.where(tl.max(is_gone.to(tl.int32), axis=1) > 0, 0.0, q)
        own += tl.where(token == draft, q, 0.0)
    return tl.sum(mass), tl.sum(own)


@triton.jit
def _next_child(is_child, node, after, BLOCK_N: tl.constexpr):
    """The first child behind node `after`, or BLOCK_N."""
    return tl.min(tl.where(is_child & (node > after), node, BLOCK_N))


@triton.jit
def _take_token(
    row, law_tokens, law_probs, draft_tokens, candidates, vocab, largest, scale, cut, last_tied,
    mass, node, is_child, max_children, uniform, out,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first child that is taken, or else a token of what is left of p."""
    taken = tl.full([], NEVER, tl.int32)
    reach = tl.zeros([], tl.float64)
    left = mass.to(tl.float64)
    outside = tl.zeros([], tl.float64)
    drafts = tl.load(draft_tokens + node, mask=is_child, other=-1)
    child = _next_child(is_child, node, 0, BLOCK_N)
    if child < BLOCK_N:
        inside = left_at_candidates(
            row, law_tokens, law_probs, candidates, largest, scale, cut, last_tied, 1.0, 0.0, out,
            BLOCK_C, False,
        )  # fmt: skip
        outside = tl.maximum(left - inside, 0.0)
    offers = 0
    while (child < BLOCK_N) & (taken == NEVER) & (offers < max_children):
        draft = tl.load(draft_tokens + child)
        is_refused = is_child & (node < child)
        q_mass, q = _law_at(law_tokens, law_probs, candidates, draft, drafts, is_refused, BLOCK_C)
        if q > 0:
            weight = kept_weight(row, draft, draft >= 0, largest, scale, cut, last_tied)
            chance = tl.maximum(weight - reach * q, 0.0) / left * (q_mass / q)
            further = reach + left / q_mass
            rest = outside + left_at_candidates(
                row, law_tokens, law_probs, candidates, largest, scale, cut, last_tied, 1.0,
                further, out, BLOCK_C, False,
            )  # fmt: skip
            if (uniform < chance) | (rest <= 0):
                taken = draft.to(tl.int32)
            else:
                uniform = tl.minimum((uniform - chance) / (1.0 - chance), LAST_UNIFORM)
                reach = further
                left = rest
        child = _next_child(is_child, node, child, BLOCK_N)
        offers += 1
    if taken == NEVER:
        taken = draw_left(
            row, law_tokens, law_probs, candidates, vocab, largest, scale, cut, last_tied, mass,
            1.0, reach, uniform, out, BLOCK, BLOCK_C,
        )  # fmt: skip
    return taken


@triton.jit
def _accept_rejection_kernel(
    draft_tokens,  # [B, N]
    parent_index,  # [B, N]
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
    max_children,
    USE_TOP_K_TOP_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    out = request * width
    node = tl.arange(0, BLOCK_N)
    is_live = (node > 0) & (node < tl.minimum(tl.load(num_nodes + request), nodes))
    length = 0
    at = tl.zeros([], tl.int32)
    while (at < BLOCK_N) & (length < width):
        row = logits + tl.load(logit_rows + at_node + at).to(tl.int64) * row_stride
        parent = tl.load(parent_index + at_node + node, mask=is_live, other=-1)
        is_child = is_live & (parent == at)
        largest, token = row_max(row, vocab, BLOCK)
        if given_k != 1:
            cut, last_tied, mass = find_kept(row, vocab, largest, scale, k, p, floor, BLOCK)
            uniform = tl.load(uniforms + request * uniform_stride + length).to(tl.float64)
            law = (at_node + at) * candidates
            token = _take_token(
                row, law_tokens + law, law_probs + law, draft_tokens + at_node, candidates, vocab,
                largest, scale, cut, last_tied, mass, node, is_child, max_children,
                tl.minimum(uniform, LAST_UNIFORM), scratch + request * vocab,
                BLOCK, BLOCK_C, BLOCK_N,
            )  # fmt: skip
        tl.store(accept_index + out + length, at.to(tl.int64))
        tl.store(emitted + out + length, token.to(tl.int64))
        length += 1
        draft = tl.load(draft_tokens + at_node + node, mask=is_child, other=-1)
        at = tl.min(tl.where(is_child & (draft == token), node, BLOCK_N))

    step = tl.arange(0, BLOCK_K)
    is_beyond = (step >= length) & (step < width)
    tl.store(accept_index + out + step, -1, mask=is_beyond)
    tl.store(emitted + out + step, 0, mask=is_beyond)
    tl.store(accept_lens + request, length)


def accept_rejection(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
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
    max_children: int,
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1. Host sync: none.

    Args:
        law_tokens: distinct in a node that has children, anything in others.
        law_probs: q of each candidate; anything in nodes without children.
        logits: bfloat16 and float16 are read as float32.
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first; no law and no uniform counts.
        max_children: most children that are offered at a node; 1 does for chains.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    batch, nodes = draft_tokens.shape
    device, width, vocab = draft_tokens.device, max_depth + 1, logits.shape[1]
    walk = Walk.unwritten(batch, width, device)
    if batch == 0:
        return walk
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    uniforms = uniforms if uniforms.stride(1) == 1 else uniforms.contiguous()
    scratch = torch.empty((batch, vocab), dtype=torch.float32, device=device)
    block_n = triton.next_power_of_2(nodes)
    _accept_rejection_kernel[(batch,)](
        *(tensor.contiguous() for tensor in (draft_tokens, parent_index, num_nodes)),
        *(tensor.contiguous() for tensor in (law_tokens, law_probs)),
        logits,
        *(tensor.contiguous() for tensor in (logit_rows, temperature, top_k, top_p, min_p)),
        uniforms,
        walk.accept_index,
        walk.accept_lens,
        walk.emitted,
        scratch,
        nodes,
        law_tokens.shape[2],
        width,
        vocab,
        logits.stride(0),
        uniforms.stride(0),
        max_children,
        USE_TOP_K_TOP_P=use_top_k_top_p,
        BLOCK_N=block_n,
        BLOCK_C=law_block(law_tokens.shape[2], block_n),
        BLOCK_K=triton.next_power_of_2(width),
        **row_blocks(vocab),
    )
    return walk


def aot_cases() -> list[AotCase]:
    """Qwen3's vocabulary; laws of 64 candidates and of all tokens."""
    numbers = "draft_tokens parent_index num_nodes law_tokens logit_rows top_k accept_index"
    numbers += " accept_lens emitted"
    reals = "law_probs temperature top_p min_p scratch"
    sizes = "nodes candidates width vocab row_stride uniform_stride max_children"
    signature = {
        **dict.fromkeys(numbers.split(), "*i64"),
        **dict.fromkeys(reals.split(), "*fp32"),
        **dict.fromkeys(sizes.split(), "i32"),
        "uniforms": "*fp64",
    }
    return [
        AotCase(
            name=f"accept_rejection {dtype} N{nodes} C{candidates} {filters}",
            kernel=_accept_rejection_kernel,
            signature={**signature, "logits": f"*{dtype}"},
            constexprs={
                "USE_TOP_K_TOP_P": filters == "top-k top-p",
                "BLOCK_N": nodes,
                "BLOCK_C": law_block(candidates, nodes),
                "BLOCK_K": 16,
                "BLOCK": MAX_BLOCK,
            },
            num_warps=16,
        )
        for dtype, nodes, candidates, filters in (
            ("bf16", 16, 64, "plain"),
            ("bf16", 64, 64, "top-k top-p"),
            ("fp32", 256, 151936, "top-k top-p"),
        )
    ]
