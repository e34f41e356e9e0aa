"""Triton twin of `reference.sample_and_walk`: one program per request, which filters visited nodes.

What survives the filters is found as in `triton.filter_probs`; borders of the filters and of the
CDF's cells move by as little as there. The CDF is summed in float64, as in `torch_ops`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase
from specstack_kernels.triton.filter_probs import (
    LOG2_E,
    MAX_BLOCK,
    NEVER,
    find_kept,
    is_kept,
    load_weights,
    row_blocks,
    row_max,
)
from specstack_kernels.types import Walk


@triton.jit
def draw(
    row, vocab, largest, scale, cut, last_tied, target, BLOCK: tl.constexpr, IS_LOGITS: tl.constexpr
):
    """The first survivor whose cumulative weight exceeds `target`, else the last survivor."""
    # A float64 takes two registers.
    HALF: tl.constexpr = (BLOCK + 1) // 2
    start = 0
    before = tl.zeros([], tl.float64)
    found = tl.full([], NEVER, tl.int32)
    last = tl.zeros([], tl.int32)
    while (start < vocab) & (found == NEVER):
        column = start + tl.arange(0, HALF)
        weight = load_weights(row, column, vocab, largest, scale, IS_LOGITS)
        survives = is_kept(weight, column, cut, last_tied) & (weight > 0)
        weight = tl.where(survives, weight, 0.0).to(tl.float64)
        mass = tl.sum(weight)
        last = tl.maximum(last, tl.max(tl.where(survives, column, 0)))
        if before + mass > target:
            is_past = survives & (before + tl.cumsum(weight, 0) > target)
            # The last one, should the sums in this order be a rounding less.
            found = tl.minimum(tl.min(tl.where(is_past, column, NEVER)), last)
        before += mass
        start += HALF
    return tl.minimum(found, last)


@triton.jit
def _sample_and_walk_kernel(
    draft_tokens,  # [B, N]
    parent_index,  # [B, N]
    num_nodes,  # [B]
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
    nodes,
    width,
    vocab,
    row_stride,
    uniform_stride,
    USE_TOP_K_TOP_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
        largest, token = row_max(row, vocab, BLOCK)
        if given_k != 1:
            cut, last_tied, mass = find_kept(row, vocab, largest, scale, k, p, floor, BLOCK)
            uniform = tl.load(uniforms + request * uniform_stride + length).to(tl.float64)
            target = uniform * mass
            token = draw(row, vocab, largest, scale, cut, last_tied, target, BLOCK, True)
        tl.store(accept_index + out + length, at.to(tl.int64))
        tl.store(emitted + out + length, token.to(tl.int64))
        length += 1
        parent = tl.load(parent_index + at_node + node, mask=is_live, other=-1)
        draft = tl.load(draft_tokens + at_node + node, mask=is_live, other=-1)
        at = tl.min(tl.where(is_live & (parent == at) & (draft == token), node, BLOCK_N))

    step = tl.arange(0, BLOCK_K)
    is_beyond = (step >= length) & (step < width)
    tl.store(accept_index + out + step, -1, mask=is_beyond)
    tl.store(emitted + out + step, 0, mask=is_beyond)
    tl.store(accept_lens + request, length)


def sample_and_walk(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
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
    """Return the accepted path of each request; K = max_depth + 1. Host sync: none.

    Args:
        logits: bfloat16 and float16 are read as float32.
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first, and no uniform counts.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    batch, nodes = draft_tokens.shape
    device, width, vocab = draft_tokens.device, max_depth + 1, logits.shape[1]
    walk = Walk.unwritten(batch, width, device)
    if batch == 0:
        return walk
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    uniforms = uniforms if uniforms.stride(1) == 1 else uniforms.contiguous()
    _sample_and_walk_kernel[(batch,)](
        *(tensor.contiguous() for tensor in (draft_tokens, parent_index, num_nodes)),
        logits,
        *(tensor.contiguous() for tensor in (logit_rows, temperature, top_k, top_p, min_p)),
        uniforms,
        walk.accept_index,
        walk.accept_lens,
        walk.emitted,
        nodes,
        width,
        vocab,
        logits.stride(0),
        uniforms.stride(0),
        USE_TOP_K_TOP_P=use_top_k_top_p,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_K=triton.next_power_of_2(width),
        **row_blocks(vocab),
    )
    return walk


@triton.jit
def _invert_cdf_kernel(
    probs,  # [B, V]
    uniforms,  # [B]
    tokens,  # [B]
    vocab,
    row_stride,
    uniform_stride,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = probs + request * row_stride
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += load_weights(row, column, vocab, 0.0, 1.0, False).to(tl.float64)
    target = tl.load(uniforms + request * uniform_stride).to(tl.float64) * tl.sum(total)
    # Nothing is cut: all that is above the bits of 0.
    token = draw(row, vocab, 0.0, 1.0, 0, -1, target, BLOCK, False)
    tl.store(tokens + request, token.to(tl.int64))


def invert_cdf(probs: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the first token whose cumulative probability exceeds the uniform. Host sync: none."""
    batch, vocab = probs.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=probs.device)
    if batch == 0:
        return tokens
    probs = probs if probs.stride(1) == 1 else probs.contiguous()
    _invert_cdf_kernel[(batch,)](
        probs, uniforms, tokens, vocab, probs.stride(0), uniforms.stride(0), **row_blocks(vocab)
    )
    return tokens


def aot_cases() -> list[AotCase]:
    """Qwen3's vocabulary, trees of up to 256 nodes."""
    numbers = (
        "draft_tokens parent_index num_nodes logit_rows top_k accept_index accept_lens emitted"
    )
    sizes = "nodes width vocab row_stride uniform_stride"
    signature = {
        **dict.fromkeys(numbers.split(), "*i64"),
        **dict.fromkeys(("temperature", "top_p", "min_p", "uniforms"), "*fp32"),
        **dict.fromkeys(sizes.split(), "i32"),
    }
    blocks = {"BLOCK_N": 256, "BLOCK_K": 16, "BLOCK": MAX_BLOCK}
    cases = [
        AotCase(
            name=f"sample_and_walk {dtype} N256 {filters}",
            kernel=_sample_and_walk_kernel,
            signature={**signature, "logits": f"*{dtype}"},
            constexprs={"USE_TOP_K_TOP_P": filters == "top-k top-p", **blocks},
            num_warps=16,
        )
        for dtype, filters in (("bf16", "plain"), ("bf16", "top-k top-p"), ("fp32", "top-k top-p"))
    ]
    invert = AotCase(
        name="invert_cdf fp32",
        kernel=_invert_cdf_kernel,
        signature={
            "probs": "*fp32",
            "uniforms": "*fp32",
            "tokens": "*i64",
            "vocab": "i32",
            "row_stride": "i32",
            "uniform_stride": "i32",
        },
        constexprs={"BLOCK": MAX_BLOCK},
        num_warps=16,
    )
    return [*cases, invert]
