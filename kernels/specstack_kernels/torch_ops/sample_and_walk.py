"""Vectorised twin of `reference.sample_and_walk`: filters only the node that a request visits.

The CDF is summed in float64, so that rounding moves a cell's border by about 1e-12 whatever V.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.torch_ops.filter_probs import filter_probs
from specstack_kernels.torch_ops.walk import walk_tree
from specstack_kernels.types import Walk


def sample_and_walk(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    logits: Float[Tensor, "T V"],
    logit_rows: Int[Tensor, "B N"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    uniforms: Float[Tensor, "B K"],
    *,
    max_depth: int,
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1. Host sync: none.

    Args:
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first, and no uniform counts.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    is_greedy = top_k == 1

    def sampled(step: int, node: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        row = logit_rows.gather(1, node[:, None])[:, 0]
        visited = logits[row].float()  # [B, V]
        probs = filter_probs(
            visited, temperature, top_k, top_p, min_p, use_top_k_top_p=use_top_k_top_p
        )
        drawn = invert_cdf(probs, uniforms[:, step])
        return torch.where(is_greedy, visited.max(dim=-1).indices, drawn)

    return walk_tree(draft_tokens, parent_index, num_nodes, sampled, max_depth=max_depth)


def invert_cdf(probs: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the first token whose cumulative probability exceeds the uniform.

    Its own probability is then positive: the CDF rises there. Host sync: none.
    """
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None].double() * total, below_total)
    return torch.searchsorted(cdf, target, right=True)[:, 0]
