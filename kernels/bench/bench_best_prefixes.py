"""Times of `best_prefixes`; `python kernels/bench/bench_best_prefixes.py` compares with the heap.

That table is for the CPU, one thread: milliseconds, median of 20.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import BenchCase, measure, sizes

from specstack_kernels import ops
from specstack_kernels.reference.best_prefixes import best_prefixes as heap
from specstack_kernels.testing_candidates import random_marginals
from specstack_kernels.torch_ops.best_prefixes import best_prefixes as torch_form

DEPTHS = (5, 8)
HEAP_BATCHES, HEAP_DRAFTS = (1, 8, 32), (8, 32, 128)


def case(batch: int, depths: int, drafts: int, device: torch.device) -> BenchCase:
    """As many candidates per depth as drafts, all live."""
    marginals = random_marginals(batch, depths, drafts, 0, dead=False)
    marginals = [tensor.to(device) for tensor in marginals]
    rival = {"torch": partial(torch_form, *marginals, drafts)}
    if device.type == "cpu":
        rival = {"heap": partial(heap, *marginals, drafts)}
    return BenchCase(
        op="best_prefixes",
        shape=f"B{batch} K{depths} S{drafts}",
        run=partial(ops.best_prefixes, *marginals, drafts),
        num_bytes=batch * (12 * depths * drafts + 24 * drafts),
        rivals=rival,
    )


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Budgets of the verify windows."""
    batches, nodes, _ = sizes(device)
    for batch in batches:
        for drafts in nodes:
            yield case(batch, max(DEPTHS), drafts, device)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    print("| shape | heap | vectorised |\n|---|---|---|")
    for depths in DEPTHS:
        for batch in HEAP_BATCHES:
            for drafts in HEAP_DRAFTS:
                one = case(batch, depths, drafts, cpu)
                times = [measure(call, cpu).ms for call in (*one.rivals.values(), one.run)]
                print(f"| {one.shape} | {times[0]:.2f} | {times[1]:.2f} |")


if __name__ == "__main__":
    main()
