"""Times of `score_frontier`, over frontiers as large as the trees they are for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import BenchCase, sizes

from specstack_kernels import ops
from specstack_kernels.torch_ops.score_frontier import score_frontier as torch_form

CANDIDATES, RANK, WIDTH = 64, 128, 16


def cases(device: torch.device) -> Iterator[BenchCase]:
    """F = N nodes of one depth; C, R and the width are fixed."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batches, nodes, _ = sizes(device)
    for batch in batches:
        for num_nodes in (1, *nodes):
            inputs = (
                torch.randn(batch, num_nodes, RANK, device=device, dtype=dtype),
                torch.randn(batch, CANDIDATES, RANK, device=device, dtype=dtype) / RANK**0.5,
                torch.randn(batch, CANDIDATES, device=device, dtype=dtype),
                torch.randn(batch, device=device, dtype=dtype),
            )
            written = num_nodes * (4 * CANDIDATES + 12 * WIDTH)
            yield BenchCase(
                op="score_frontier",
                shape=f"B{batch} F{num_nodes} C{CANDIDATES} R{RANK} width{WIDTH}",
                run=partial(ops.score_frontier, *inputs, width=WIDTH),
                num_bytes=sum(x.nbytes for x in inputs) + batch * written,
                rivals={"torch": partial(torch_form, *inputs, width=WIDTH)},
                num_flops=2 * batch * num_nodes * CANDIDATES * RANK,
            )
