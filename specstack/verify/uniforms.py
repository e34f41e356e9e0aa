"""Uniform numbers that depend on nothing but a request's seed and the token's position.

A seeded request therefore repeats itself whatever the drafter, the budget, the batch it runs in
or the round that a token falls into; unless its drafts are drawn, which decide what is emitted.
Generator: splitmix64 (Steele, Lea and Flood, OOPSLA 2014)
as a counter-based hash.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def seeded_uniforms(
    seeds: Int[Tensor, " B"], positions: Int[Tensor, "B K"]
) -> Float[Tensor, "B K"]:
    """Return float64 numbers in [0, 1) with 53 random bits. Host sync: none."""
    return _shift_right(seeded_numbers(seeds, positions), 11).to(torch.float64) * 2.0**-53


def seeded_numbers(seeds: Int[Tensor, " B"], positions: Int[Tensor, "B K"]) -> Int[Tensor, "B K"]:
    """Return 64 random bits each, of use as seeds, too. Host sync: none."""
    state = _mix(seeds.to(torch.int64)[:, None] + _GOLDEN)
    return _mix(state + (positions.to(torch.int64) + 1) * _GOLDEN)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, n: int) -> Tensor:
    """Logical shift of int64."""
    return (z >> n) & ((1 << (64 - n)) - 1)
