"""Times of `best_nodes`, over tries that hold a budget of candidates per depth."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import BenchCase, sizes

from specstack_kernels import ops
from specstack_kernels.testing_candidates import random_trie
from specstack_kernels.torch_ops.best_nodes import best_nodes as torch_form

DEPTH = 8


def cases(device: torch.device) -> Iterator[BenchCase]:
    """M = DEPTH * N candidates, of which N - 1 are chosen."""
    batches, nodes, _ = sizes(device)
    for batch in batches:
        for num_nodes in nodes:
            drafts, candidates = num_nodes - 1, DEPTH * num_nodes
            trie = [t.to(device) for t in random_trie(batch, candidates, 0, dead=False)]
            ours = partial(ops.best_nodes, *trie, drafts, max_depth=DEPTH)
            plain = partial(torch_form, *trie, drafts, max_depth=DEPTH)
            yield BenchCase(
                op="best_nodes",
                shape=f"B{batch} M{candidates} S{drafts}",
                run=ours,
                num_bytes=batch * (12 * candidates + 20 * drafts),
                rivals={"torch": plain},
            )
