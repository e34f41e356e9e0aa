"""Times of `accept_greedy` beside SGLang's walk over links, and of the argmax before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from harness import QWEN3_8B, BenchCase, Lazy, Rival, sizes
from walked_tree import CHAIN, WalkedTree, sglang_arguments, walked_tree

from specstack_kernels import ops
from specstack_kernels.torch_ops.accept_greedy import accept_greedy as torch_form

MAX_ROWS = 1024
"""Of the argmax."""


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Every request accepts CHAIN drafts."""
    batches, nodes, _ = sizes(device)
    for rows in sorted({batch * num_nodes for batch, num_nodes in product(batches, nodes)}):
        if rows <= MAX_ROWS:
            yield _argmax(rows, device)
    for batch, num_nodes in product(batches, nodes):
        yield _walk(batch, num_nodes, device)


def _argmax(rows: int, device: torch.device) -> BenchCase:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn((rows, QWEN3_8B["vocab"]), device=device, dtype=dtype)
    return BenchCase(
        op="argmax of all nodes",
        shape=f"T{rows} V{logits.shape[1]}",
        run=partial(logits.max, dim=-1),
        num_bytes=logits.nbytes,
    )


def _walk(batch: int, nodes: int, device: torch.device) -> BenchCase:
    tree = walked_tree(batch, nodes, device)
    predict = tree.draft_tokens + 1  # of a node in the chain: the next one
    rivals: dict[str, Rival] = {"torch": partial(torch_form, *tree, predict, max_depth=CHAIN)}
    if device.type == "cuda":
        rivals["sglang"] = Lazy(partial(_sglang, tree, predict))
    return BenchCase(
        op="accept_greedy",
        shape=f"B{batch} N{nodes} K{CHAIN + 1}",
        run=partial(ops.accept_greedy, *tree, predict, max_depth=CHAIN),
        num_bytes=8 * batch * (3 * nodes + 2 * CHAIN + 4),
        rivals=rivals,
    )


def _sglang(tree: WalkedTree, predict: torch.Tensor) -> Callable[[], object]:
    from sglang.kernels.ops.speculative.tree import verify_tree_greedy

    return partial(verify_tree_greedy, **sglang_arguments(tree), target_predict=predict)
