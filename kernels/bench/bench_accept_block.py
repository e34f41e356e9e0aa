"""Times of `accept_block`, which filters all nodes of its chains whatever is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from drawn_chain import ALL, CANDIDATES, DRAFTS, FILTERS, drawn_chain, settings
from harness import BenchCase, sizes

from specstack_kernels import ops
from specstack_kernels.torch_ops.accept_block import accept_block as torch_form


def cases(device: torch.device) -> Iterator[BenchCase]:
    """One uniform per request, which decides the length alone."""
    for batch, filters in product(sizes(device)[0], FILTERS):
        chain = drawn_chain(batch, device)
        uniforms = torch.full((batch, 1), 0.5, device=device, dtype=torch.float64)
        tree = (chain.draft_tokens, chain.num_nodes, *chain[3:])
        inputs = (*tree, *settings(batch, filters, device), uniforms)
        limits = {"max_depth": DRAFTS, "use_top_k_top_p": FILTERS[filters] != (ALL, 1.0)}
        row = chain.logits.shape[1] * chain.logits.itemsize
        law = chain.law_tokens[0, 0].nbytes + chain.law_probs[0, 0].nbytes
        yield BenchCase(
            op="accept_block",
            shape=f"B{batch} chain {DRAFTS} C{CANDIDATES}, {filters}",
            run=partial(ops.accept_block, *inputs, **limits),
            num_bytes=batch * (DRAFTS + 1) * (row + law),
            rivals={"torch": partial(torch_form, *inputs, **limits)},
        )
