"""Times of `link_tree` beside SGLang's `build_tree_kernel_efficient`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from harness import BenchCase, Lazy, Rival, sizes
from torch import Tensor

from specstack_kernels import ops
from specstack_kernels.testing import random_tree
from specstack_kernels.torch_ops.link_tree import link_tree as torch_form

VOCAB = 8
"""Children of a node at most."""


def cases(device: torch.device) -> Iterator[BenchCase]:
    """A random tree without dead nodes: half of the nodes extend the last one."""
    batches, nodes, _ = sizes(device)
    for batch, num_nodes in product(batches, nodes):
        _, parents, live, depth = random_tree(1, num_nodes, VOCAB, 0)
        inputs = (parents.repeat(batch, 1).to(device), live.repeat(batch).to(device))
        rivals: dict[str, Rival] = {"torch": partial(torch_form, *inputs, max_depth=depth)}
        if device.type == "cuda":
            rivals["sglang"] = Lazy(partial(_sglang, inputs[0], depth))
        yield BenchCase(
            op="link_tree",
            shape=f"B{batch} N{num_nodes} depth {depth}",
            run=partial(ops.link_tree, *inputs, max_depth=depth),
            num_bytes=batch * num_nodes * (32 + num_nodes),
            rivals=rivals,
        )


def _sglang(parents: Tensor, depth: int) -> Callable[[], object]:
    """Its candidate `parent * topk + rank` is a child of node `parent`; node 0 is the root.

    With topk = N every node can have a candidate of its own, so that it builds the same trees.
    """
    from sglang.kernels.ops.speculative.tree import build_tree_kernel_efficient

    batch, nodes = parents.shape
    depth = max(depth, 2)
    selected = parents[:, 1:] * nodes + torch.arange(1, nodes, device=parents.device)
    parent_list = parents.new_zeros((batch, nodes * (depth - 1) + 1))
    parent_list[:, 1:nodes] = selected
    seq_lens = parents.new_zeros(batch)

    def run() -> None:
        # As its caller does: the kernel links into -1 and masks into ones.
        links = torch.full((3, batch, nodes), -1, device=parents.device)
        mask = torch.full((batch * nodes * nodes,), True, device=parents.device)
        positions = torch.empty(batch * nodes, dtype=torch.int64, device=parents.device)
        build_tree_kernel_efficient(
            parent_list, selected, seq_lens, mask, positions, *links,
            nodes, depth, nodes, tree_mask_mode=1,
        )  # fmt: skip

    return run
