"""Times of `filter_probs` and `invert_cdf`: the distribution of one node per request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from harness import QWEN3_8B, BenchCase, sizes

from specstack_kernels import ops
from specstack_kernels.testing import RandomSampling
from specstack_kernels.torch_ops.filter_probs import filter_probs as torch_filter
from specstack_kernels.torch_ops.sample_and_walk import invert_cdf as torch_invert

ALL = 1 << 30
FILTERS = {"temperature": (ALL, 1.0), "top-k 50 top-p 0.9": (50, 0.9)}


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Float32, as the ops take it; SmolLM2's vocabulary, then Qwen3's."""
    batches, _, _ = sizes(device)
    for batch, vocab in product(batches, (49_152, QWEN3_8B["vocab"])):
        logits = 3 * torch.randn((batch, vocab), device=device)
        for filters in FILTERS:
            yield _filter(logits, filters)
        yield _invert(logits.softmax(dim=-1))


def _filter(logits: torch.Tensor, filters: str) -> BenchCase:
    top_k, top_p = FILTERS[filters]
    sampling = RandomSampling(
        *(
            torch.full((len(logits),), value, device=logits.device)
            for value in (0.7, top_k, top_p, 0.0)
        )
    )
    use = {"use_top_k_top_p": (top_k, top_p) != (ALL, 1.0)}
    return BenchCase(
        op="filter_probs",
        shape=f"B{len(logits)} V{logits.shape[1]}, {filters}",
        run=partial(ops.filter_probs, logits, *sampling, **use),
        num_bytes=2 * logits.nbytes,
        rivals={"torch": partial(torch_filter, logits, *sampling, **use)},
    )


def _invert(probs: torch.Tensor) -> BenchCase:
    uniforms = torch.rand(len(probs), device=probs.device)
    rivals = {"torch": partial(torch_invert, probs, uniforms)}
    if probs.is_cuda:
        from specstack_kernels.triton.sample_and_walk import invert_cdf as triton_invert

        rivals["triton"] = partial(triton_invert, probs, uniforms)
    return BenchCase(
        op="invert_cdf",
        shape=f"B{len(probs)} V{probs.shape[1]}",
        run=partial(ops.invert_cdf, probs, uniforms),
        num_bytes=probs.nbytes,
        rivals=rivals,
    )
