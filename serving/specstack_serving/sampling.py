"""Sampling settings of a batch, and where its random numbers come from."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack.types import Drawing, SamplingTensors, index_on
from specstack.verify.uniforms import seeded_uniforms


class UniformSource:
    """Uniforms per request and position: a request's seed decides them, if it has one.

    Unseeded numbers come from a generator that every rank seeds alike.
    """

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)

    def draw(
        self, seeds: list[int | None], first: Int[Tensor, " B"], num_positions: int
    ) -> Float[Tensor, "B K"]:
        """Numbers for positions first, first + 1, ... of each request."""
        device = self._generator.device
        uniforms = torch.rand(
            (len(seeds), num_positions),
            generator=self._generator,
            device=device,
            dtype=torch.float64,
        )
        if all(seed is None for seed in seeds):
            return uniforms
        positions = first.to(torch.int64)[:, None] + torch.arange(num_positions, device=device)
        seed_tensor, is_seeded = self._stated(seeds)
        return torch.where(is_seeded[:, None], seeded_uniforms(seed_tensor, positions), uniforms)

    def seeds(self, seeds: list[int | None]) -> Int[Tensor, " B"]:
        """The requests' seeds; a new number for each that has none."""
        device = self._generator.device
        drawn = torch.randint(
            torch.iinfo(torch.int64).max, (len(seeds),), generator=self._generator, device=device
        )
        if all(seed is None for seed in seeds):
            return drawn
        stated, is_seeded = self._stated(seeds)
        return torch.where(is_seeded, stated, drawn)

    def _stated(self, seeds: list[int | None]) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
        device = self._generator.device
        is_seeded = index_on([seed is not None for seed in seeds], device).to(torch.bool)
        return index_on([seed or 0 for seed in seeds], device), is_seeded


def drawing(batch: Any, uniforms: UniformSource) -> Drawing:
    """How a ScheduleBatch's drafts are drawn: at its requests' temperatures."""
    info = batch.sampling_info
    return Drawing(
        temperature=info.temperatures[:, 0],
        is_greedy=info.top_ks == 1,
        seeds=uniforms.seeds([req.sampling_params.sampling_seed for req in batch.reqs]),
    )


def sampling_tensors(
    batch: Any, uniforms: UniformSource, first: Int[Tensor, " B"], num_positions: int
) -> SamplingTensors:
    """Collect a ScheduleBatch's settings.

    Args:
        first: position of the token whose logits come first: the root, or the prompt's last.
    """
    info = batch.sampling_info
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    if info.is_all_greedy:
        numbers = torch.zeros((len(seeds), num_positions), device=info.temperatures.device)
    else:
        numbers = uniforms.draw(seeds, first, num_positions)
    return SamplingTensors(
        temperature=info.temperatures[:, 0],
        top_k=info.top_ks.to(torch.int64),
        top_p=info.top_ps,
        min_p=info.min_ps,
        uniforms=numbers,
        is_all_greedy=info.is_all_greedy,
        use_top_k_top_p=info.need_top_k_sampling or info.need_top_p_sampling,
    )
