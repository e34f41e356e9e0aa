"""Seeded uniforms: a function of seed and position alone, and uniform."""

from __future__ import annotations

import torch
from scipy import stats

from specstack.verify.uniforms import seeded_uniforms


def test_splitmix64_reference_values() -> None:
    """The published generator's first outputs for seed 0: the same mixing constants and shifts."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    seeds, positions = [0, 1, 42, 2**40 + 5], [0, 1, 17, 8191]
    state = [mix((s + golden) & mask) for s in seeds]
    expected = [
        [(mix((z + (p + 1) * golden) & mask) >> 11) * 2.0**-53 for p in positions] for z in state
    ]
    found = seeded_uniforms(torch.tensor(seeds), torch.tensor([positions] * len(seeds)))
    assert found.tolist() == expected


def test_a_position_keeps_its_number_whatever_round_it_falls_into() -> None:
    whole = seeded_uniforms(torch.tensor([9]), torch.arange(100, 140)[None])
    later = seeded_uniforms(torch.tensor([9]), torch.arange(117, 125)[None])
    assert torch.equal(whole[:, 17:25], later)


def test_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = seeded_uniforms(torch.arange(200), torch.arange(500).expand(200, -1)).numpy()
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3
    assert abs(stats.pearsonr(numbers[:, :-1].ravel(), numbers[:, 1:].ravel()).statistic) < 0.01
    assert abs(stats.pearsonr(numbers[:-1].ravel(), numbers[1:].ravel()).statistic) < 0.01
