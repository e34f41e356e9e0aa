"""Times of `accept_typical`, which filters the target at every node."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from drawn_chain import ALL, DRAFTS, FILTERS, drawn_chain, settings
from harness import BenchCase, sizes

from specstack_kernels import ops


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Chains; a tree of as many nodes takes as long."""
    for batch, filters in product(sizes(device)[0], FILTERS):
        chain = drawn_chain(batch, device)
        uniforms = torch.full((batch, DRAFTS + 1), 0.5, device=device, dtype=torch.float64)
        inputs = (*chain[:3], *chain[5:], *settings(batch, filters, device), uniforms)
        yield BenchCase(
            op="accept_typical",
            shape=f"B{batch} chain {DRAFTS}, {filters}",
            run=partial(
                ops.accept_typical,
                *inputs,
                max_depth=DRAFTS,
                epsilon=0.09,
                delta=0.3,
                use_top_k_top_p=FILTERS[filters] != (ALL, 1.0),
            ),
            num_bytes=chain.logits.nbytes,
        )
