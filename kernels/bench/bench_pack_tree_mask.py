"""Times of `pack_tree_mask`, beside a loop over requests that concatenates their rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import BenchCase, sizes
from jaxtyping import Bool
from torch import Tensor

from specstack_kernels import ops
from specstack_kernels.torch_ops.pack_tree_mask import pack_tree_mask as torch_form

MAX_FLAGS = 1 << 28
"""Larger masks than a server would hold are left out."""


def by_request(tree_mask: Bool[Tensor, "B N N"], lens: list[int]) -> Bool[Tensor, " T"]:
    """The lengths are on the host."""
    rows = [
        torch.cat([mask.new_ones(len(mask), length), mask], dim=1).flatten()
        for mask, length in zip(tree_mask, lens, strict=True)
    ]
    return torch.cat(rows)


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Requests of one length, all of them at the context."""
    for batch, nodes, context in _shapes(device):
        tree_mask = torch.ones((batch, nodes, nodes), dtype=torch.bool, device=device).tril()
        seq_lens = torch.full((batch,), context, device=device)
        arguments = (tree_mask, seq_lens)
        yield BenchCase(
            op="pack_tree_mask",
            shape=f"B{batch} N{nodes} L{context}",
            run=partial(ops.pack_tree_mask, *arguments, num_tokens=batch * context),
            num_bytes=batch * nodes * (context + 2 * nodes) + 8 * (2 * batch + 1),
            rivals={
                "torch": partial(torch_form, *arguments, num_tokens=batch * context),
                "loop over requests": partial(by_request, tree_mask, [context] * batch),
            },
        )


def _shapes(device: torch.device) -> Iterator[tuple[int, int, int]]:
    batches, nodes, contexts = sizes(device)
    for batch in batches:
        for num_nodes in nodes:
            for context in contexts:
                if batch * num_nodes * (context + num_nodes) <= MAX_FLAGS:
                    yield batch, num_nodes, context
