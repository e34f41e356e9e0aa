"""Triton twin of `reference.filter_probs`: one program per request, passes over its row, no sort.

A token's weight is exp((logit - largest) / temperature), in (0, 1]: a multiple of its probability.
Both cuts keep a prefix of the ranks, so they are one weight, `cut`, and a number of tokens that tie
with it. It is sought between bit patterns, which rise with the weight; every pass counts and adds
up what lies above three of them, and the search ends when one value is left.

Weights and their sums (4096 interleaved ones, then a tree) are float32 and exact to about 1e-6 of
themselves, as the definition's are. A token whose `mass before` is that close to top_p, or whose
probability is that close to min_p times the largest, may fall on the other side of the border than
in the definition. Tokens with equal logits always tie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.aot import AotCase

MAX_BLOCK = 4096
LOG2_E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(0x3F800000)
"""Bits of 1.0, the largest weight."""
GUESS = tl.constexpr(0x39800000)
"""Bits of 2^-12: where the search parts the weights first."""
NEVER = tl.constexpr(0x7FFFFFFF)
"""Above the bits of every weight, and the number of tokens that no top-k forbids."""


@triton.jit
def row_max(logits, vocab, BLOCK: tl.constexpr):
    """The largest logit and the lowest token that has it."""
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    token = tl.full([BLOCK], NEVER, tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        token = tl.where(value > largest, column, token)
        largest = tl.maximum(largest, value)
    best = tl.max(largest)
    # A row of NaN names a token, too.
    return best, tl.minimum(tl.min(tl.where(largest == best, token, NEVER)), vocab - 1)


@triton.jit
def load_weights(row, column, vocab, largest, scale, IS_LOGITS: tl.constexpr):
    """Weights from logits, or as they stand in `row`; 0 beyond the vocabulary."""
    if IS_LOGITS:
        value = tl.load(row + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        return tl.exp2((value - largest) * scale)
    return tl.load(row + column, mask=column < vocab, other=0.0).to(tl.float32)


@triton.jit
def _pass(logits, vocab, largest, scale, a, b, c, low, high, BLOCK: tl.constexpr):
    """Tokens above each of three pivots, their masses, and the extreme bits in (low, high]."""
    count_a = tl.zeros([BLOCK], tl.int32)
    count_b = tl.zeros([BLOCK], tl.int32)
    count_c = tl.zeros([BLOCK], tl.int32)
    mass_a = tl.zeros([BLOCK], tl.float32)
    mass_b = tl.zeros([BLOCK], tl.float32)
    mass_c = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], NEVER, tl.int32)
    greatest = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        weight = load_weights(logits, column, vocab, largest, scale, True)
        bits = tl.where(column < vocab, weight.to(tl.int32, bitcast=True), -2)
        count_a += (bits > a).to(tl.int32)
        count_b += (bits > b).to(tl.int32)
        count_c += (bits > c).to(tl.int32)
        mass_a += tl.where(bits > a, weight, 0.0)
        mass_b += tl.where(bits > b, weight, 0.0)
        mass_c += tl.where(bits > c, weight, 0.0)
        is_between = (bits > low) & (bits <= high)
        least = tl.minimum(least, tl.where(is_between, bits, NEVER))
        greatest = tl.maximum(greatest, tl.where(is_between, bits, -1))
    counts = (tl.sum(count_a), tl.sum(count_b), tl.sum(count_c))
    masses = (tl.sum(mass_a), tl.sum(mass_b), tl.sum(mass_c))
    return counts, masses, tl.min(least), tl.max(greatest)


@triton.jit
def _narrow(pivot, count_above, mass_above, top_k, max_mass, low, high, rest, count, mass):
    """Put a pivot of [low, high] in the place of one of them; see `find_cut`."""
    # Whether a token at the pivot survives, or the first of those that tie there. This rises with
    # the pivot in floating point, too: sums of fewer numbers in the same order are not greater.
    survives = (count_above < top_k) & (mass_above <= max_mass)
    is_high = survives & (pivot < high)
    is_low = (survives == 0) & (pivot >= low)
    high = tl.where(is_high, pivot, high)
    count = tl.where(is_high, count_above, count)
    mass = tl.where(is_high, mass_above, mass)
    low = tl.where(is_low, pivot, low)
    rest = tl.where(is_low, count_above, rest)
    return low, high, rest, count, mass


@triton.jit
def find_cut(logits, vocab, largest, scale, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Returns (cut, tied, are_all_tied, mass): the weights above `cut` survive, and the first
    `tied` tokens of those at it; together they weigh `mass`. All weights are given by their bits.

    Invariant of the search: nothing at or below `low` survives; everything above `high` does, that
    is `count` tokens that weigh `mass`; `rest` tokens lie above `low`.
    """
    low = tl.maximum(min_p.to(tl.int32, bitcast=True), 0) - 1
    high = tl.full([], ONE, tl.int32)
    rest = tl.full([], NEVER, tl.int32)
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float32)
    # All tokens, those that min_p leaves, and a guess.
    guess = tl.maximum(low, GUESS)
    counts, masses, least, greatest = _pass(
        logits, vocab, largest, scale, -1, low, guess, low, high, BLOCK
    )
    max_mass = tl.where(top_p < 1.0, top_p * masses[0], float("inf"))
    low, high, rest, count, mass = _narrow(
        low, counts[1], masses[1], top_k, max_mass, low, high, rest, count, mass
    )
    low, high, rest, count, mass = _narrow(
        guess, counts[2], masses[2], top_k, max_mass, low, high, rest, count, mass
    )
    while high - low > 1:
        quarter = (high - low + 3) // 4
        a = low + quarter
        b = tl.minimum(a + quarter, high)
        c = tl.minimum(b + quarter, high)
        counts, masses, least, greatest = _pass(
            logits, vocab, largest, scale, a, b, c, low, high, BLOCK
        )
        low, high, rest, count, mass = _narrow(
            a, counts[0], masses[0], top_k, max_mass, low, high, rest, count, mass
        )
        low, high, rest, count, mass = _narrow(
            b, counts[1], masses[1], top_k, max_mass, low, high, rest, count, mass
        )
        low, high, rest, count, mass = _narrow(
            c, counts[2], masses[2], top_k, max_mass, low, high, rest, count, mass
        )
        # Nothing lies between `greatest` and the old `high`, nor between the old `low` and `least`.
        high = tl.minimum(high, tl.maximum(greatest, low))
        low = tl.minimum(tl.maximum(low, least - 1), high)
    # high == low: whatever min_p leaves survives, and nothing at `low`.
    weight = tl.where(high > low, high, ONE).to(tl.float32, bitcast=True)
    by_mass = tl.minimum(tl.floor((max_mass - mass) / weight) + 1.0, 1e9).to(tl.int32)
    tied = tl.minimum(tl.minimum(top_k - count, by_mass), rest - count)
    tied = tl.where(high > low, tied, 0)
    are_all_tied = (tied == 0) | (tied == rest - count)
    return high, tied, are_all_tied, mass + tied * weight


@triton.jit
def find_tied_token(logits, vocab, largest, scale, cut, tied, BLOCK: tl.constexpr):
    """The token that is number `tied`, from 1, of those whose bits are `cut`, by token id."""
    start = 0
    before = 0
    token = tl.full([], NEVER, tl.int32)
    while (start < vocab) & (token == NEVER):
        column = start + tl.arange(0, BLOCK)
        weight = load_weights(logits, column, vocab, largest, scale, True)
        is_tied = (weight.to(tl.int32, bitcast=True) == cut) & (column < vocab)
        rank = before + tl.cumsum(is_tied.to(tl.int32), 0)
        token = tl.min(tl.where(is_tied & (rank == tied), column, NEVER))
        before += tl.sum(is_tied.to(tl.int32))
        start += BLOCK
    return token


@triton.jit
def is_kept(weight, column, cut, last_tied):
    """Which weights survive: above the cut, or at it and not beyond the last tied token."""
    bits = weight.to(tl.int32, bitcast=True)
    return (bits > cut) | ((bits == cut) & (column <= last_tied))


@triton.jit
def find_kept(logits, vocab, largest, scale, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Returns (cut, last tied token, mass) for `is_kept`."""
    cut, tied, are_all_tied, mass = find_cut(
        logits, vocab, largest, scale, top_k, top_p, min_p, BLOCK
    )
    last_tied = tl.where(tied > 0, vocab, -1)
    if are_all_tied == 0:
        last_tied = find_tied_token(logits, vocab, largest, scale, cut, tied, BLOCK)
    return cut, last_tied, mass


@triton.jit
def _filter_probs_kernel(
    logits,  # [B, V]
    temperature,  # [B]
    top_k,  # [B]
    top_p,  # [B]
    min_p,  # [B]
    probs,  # [B, V]
    row_stride,
    vocab,
    USE_TOP_K_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = logits + request * row_stride
    scale = LOG2_E / tl.load(temperature + request)
    k = tl.full([], NEVER, tl.int32)
    p = tl.full([], 1.0, tl.float32)
    if USE_TOP_K_TOP_P:
        k = tl.minimum(tl.load(top_k + request), NEVER).to(tl.int32)
        p = tl.load(top_p + request)
    largest, _ = row_max(row, vocab, BLOCK)
    cut, last_tied, mass = find_kept(
        row, vocab, largest, scale, k, p, tl.load(min_p + request), BLOCK
    )
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        weight = load_weights(row, column, vocab, largest, scale, True)
        kept = tl.where(is_kept(weight, column, cut, last_tied), weight / mass, 0.0)
        tl.store(probs + request * vocab + column, kept, mask=column < vocab)


def filter_probs(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    *,
    use_top_k_top_p: bool = True,
) -> Float[Tensor, "B V"]:
    """Return what each request samples from, in float32. Host sync: none.

    Args:
        use_top_k_top_p: False leaves the two cuts out, for batches without them.
    """
    batch, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    probs = torch.empty((batch, vocab), dtype=torch.float32, device=logits.device)
    if batch == 0:
        return probs
    _filter_probs_kernel[(batch,)](
        logits,
        *(setting.contiguous() for setting in (temperature, top_k, top_p, min_p)),
        probs,
        logits.stride(0),
        vocab,
        USE_TOP_K_TOP_P=use_top_k_top_p,
        **row_blocks(vocab),
    )
    return probs


def row_blocks(vocab: int) -> dict[str, int]:
    """Launch parameters of a program that passes over rows, with a multiprocessor to itself."""
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab))
    return {"BLOCK": block, "num_warps": max(1, block // 256)}


def aot_cases() -> list[AotCase]:
    """Qwen3's vocabulary."""
    signature = {"temperature": "*fp32", "top_k": "*i64", "top_p": "*fp32", "min_p": "*fp32",
                 "probs": "*fp32", "row_stride": "i32", "vocab": "i32"}  # fmt: skip
    return [
        AotCase(
            name=f"filter_probs {dtype}",
            kernel=_filter_probs_kernel,
            signature={"logits": f"*{dtype}", **signature},
            constexprs={"USE_TOP_K_TOP_P": True, "BLOCK": MAX_BLOCK},
            num_warps=16,
        )
        for dtype in ("bf16", "fp32")
    ]
