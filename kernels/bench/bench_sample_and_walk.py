"""Times of `sample_and_walk` beside SGLang's sampled verification, which filters all nodes.

SGLang: softmax, top-k and top-p of all nodes, then its tree sampling. Beyond `MAX_ROWS` its
probabilities of all nodes would take tens of gigabytes and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from harness import QWEN3_8B, BenchCase, Lazy, Rival, sizes
from torch import Tensor
from walked_tree import CHAIN, WalkedTree, sglang_arguments, walked_tree

from specstack_kernels import ops
from specstack_kernels.testing import RandomSampling
from specstack_kernels.torch_ops.sample_and_walk import sample_and_walk as torch_form

MAX_ROWS = 1024
ALL = 1 << 30
FILTERS = {"temperature": (ALL, 1.0), "top-k 20 top-p 0.95": (20, 0.95), "top-p 0.95": (ALL, 0.95)}
TEMPERATURE, LIKELY = 1.0, 20.0
"""A draft of this logit outweighs 151,936 of the standard normal times 3 by about 30 to 1."""


def cases(device: torch.device) -> Iterator[BenchCase]:
    """One visited node, then CHAIN + 1 of them."""
    batches, nodes, _ = sizes(device)
    for (batch, num_nodes), filters in product(product(batches, nodes), FILTERS):
        for depth in (0, CHAIN):
            yield _case(batch, num_nodes, depth, filters, device)


def _case(batch: int, nodes: int, depth: int, filters: str, device: torch.device) -> BenchCase:
    tree = walked_tree(batch, nodes, device)
    logits, rows = _visited_logits(batch, nodes, device)
    top_k, top_p = FILTERS[filters]
    sampling = RandomSampling(
        *(torch.full((batch,), value, device=device) for value in (TEMPERATURE, top_k, top_p, 0.0))
    )
    # The draft's token stands before nearly all others: any uniform up to 0.9 draws it.
    uniforms = torch.full((batch, CHAIN + 1), 0.5, device=device)
    inputs = (*tree, logits, rows, *sampling, uniforms)
    limits = {"max_depth": depth, "use_top_k_top_p": (top_k, top_p) != (ALL, 1.0)}
    rivals: dict[str, Rival] = {"torch": partial(torch_form, *inputs, **limits)}
    if device.type == "cuda" and depth == CHAIN and batch * nodes <= MAX_ROWS:
        rivals["sglang, all nodes"] = Lazy(
            partial(_sglang, tree, logits, rows, sampling, FILTERS[filters])
        )
    return BenchCase(
        op="sample_and_walk",
        shape=f"B{batch} N{nodes} V{logits.shape[1]} visits {depth + 1}, {filters}",
        run=partial(ops.sample_and_walk, *inputs, **limits),
        num_bytes=(depth + 1) * batch * logits.shape[1] * logits.itemsize + 24 * batch * nodes,
        rivals=rivals,
    )


def _visited_logits(batch: int, nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits of the visited nodes, and rows: the others name the root's."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn((batch, CHAIN + 1, QWEN3_8B["vocab"]), device=device, dtype=dtype)
    logits *= 3
    step = torch.arange(CHAIN + 1, device=device)
    logits[:, step, step + 1] = LIKELY
    node = torch.arange(nodes, device=device)
    first = torch.arange(batch, device=device)[:, None] * (CHAIN + 1)
    return logits.flatten(0, 1), first + torch.where(node <= CHAIN, node, 0)


def _sglang(
    tree: WalkedTree,
    logits: Tensor,
    rows: Tensor,
    sampling: RandomSampling,
    cuts: tuple[int, float],
) -> Callable[[], object]:
    from sglang.kernels.ops.sampling import softmax
    from sglang.kernels.ops.sampling.renorm import top_k_renorm_prob, top_p_renorm_prob
    from sglang.kernels.ops.speculative.sampling import tree_speculative_sampling_target_only

    batch, nodes = tree.draft_tokens.shape
    temperature, top_k, top_p = (x.repeat_interleave(nodes) for x in sampling[:3])
    top_k = top_k.int()
    uniforms = torch.full((batch, nodes), 0.5, device=logits.device)
    arguments = sglang_arguments(tree)
    node_logits = logits[rows].flatten(0, 1).float()

    def run() -> None:
        probs = softmax(node_logits, temperatures=temperature[:, None])
        if cuts[0] != ALL:
            probs = top_k_renorm_prob(probs, top_k)
        if cuts[1] != 1.0:
            probs = top_p_renorm_prob(probs, top_p)
        probs = probs.view(batch, nodes, -1)
        tree_speculative_sampling_target_only(
            **arguments,
            uniform_samples=uniforms,
            uniform_samples_for_final_sampling=uniforms[:, 0].contiguous(),
            target_probs=probs,
            draft_probs=torch.zeros_like(probs),
        )

    return run
