"""Times of `accept_rejection` over chains, beside FlashInfer's chain sampling.

FlashInfer's takes probabilities of the whole vocabulary, of drafter and target, as they are: the
filters, and laying out both, are not in its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from drawn_chain import ALL, CANDIDATES, DRAFTS, FILTERS, DrawnChain, drawn_chain, settings
from harness import BenchCase, Lazy, Rival, sizes

from specstack_kernels import ops
from specstack_kernels.torch_ops.accept_rejection import accept_rejection as torch_form


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Uniforms of 0 accept every draft up to the depth."""
    for batch, filters in product(sizes(device)[0], FILTERS):
        chain = drawn_chain(batch, device)
        for visits in (1, DRAFTS + 1):
            uniforms = torch.zeros((batch, visits), device=device, dtype=torch.float64)
            inputs = (*chain, *settings(batch, filters, device), uniforms)
            limits = {
                "max_depth": visits - 1,
                "max_children": 1,
                "use_top_k_top_p": FILTERS[filters] != (ALL, 1.0),
            }
            rivals: dict[str, Rival] = {"torch": partial(torch_form, *inputs, **limits)}
            if device.type == "cuda" and visits > 1:
                rivals["flashinfer, without filters"] = Lazy(partial(_flashinfer, chain))
            row = chain.logits.shape[1] * chain.logits.itemsize
            law = chain.law_tokens[0, 0].nbytes + chain.law_probs[0, 0].nbytes
            yield BenchCase(
                op="accept_rejection",
                shape=f"B{batch} chain {DRAFTS} C{CANDIDATES}, visits {visits}, {filters}",
                run=partial(ops.accept_rejection, *inputs, **limits),
                num_bytes=batch * visits * (row + law),
                rivals=rivals,
            )


def _flashinfer(chain: DrawnChain) -> Callable[[], object]:
    from flashinfer.sampling import chain_speculative_sampling

    batch, nodes, _ = chain.law_tokens.shape
    p = chain.logits.float().softmax(dim=-1).view(batch, nodes, -1)
    q = torch.zeros_like(p).scatter(2, chain.law_tokens, chain.law_probs)[:, :-1].contiguous()
    drafts = chain.draft_tokens[:, 1:].int().contiguous()
    return partial(chain_speculative_sampling, q, drafts, p)
