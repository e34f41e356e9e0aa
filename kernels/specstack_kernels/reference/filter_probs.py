"""The target's distribution after temperature, top-k, top-p and min-p: the definition.

Order and edge cases are SGLang's plain sampler: softmax of logits / temperature; sort by
probability; keep a token while its rank is below top_k and the mass before it is at most top_p
(both cuts look at the same unfiltered probabilities); then drop what is below min_p times the
largest probability; renormalise. Equal probabilities rank by token id. One deviation: top_p = 1
disables the cut, where SGLang drops the tail if rounding lifts the running sum above 1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def filter_probs(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    *,
    use_top_k_top_p: bool = True,
) -> Float[Tensor, "B V"]:
    """Return what each request samples from.

    Args:
        use_top_k_top_p: False leaves the two sorting filters out, for batches without them.
    """
    out = torch.zeros_like(logits)
    for b in range(logits.shape[0]):
        probs = torch.softmax(logits[b] / temperature[b], dim=-1)
        order = sorted(range(len(probs)), key=lambda v: (-float(probs[v]), v))
        largest = probs[order[0]]
        mass = torch.cumsum(probs[order], dim=-1)
        for rank, v in enumerate(order):
            if use_top_k_top_p:
                before = mass[rank] - probs[v]
                if rank >= top_k[b] or (top_p[b] < 1 and before > top_p[b]):
                    break
            if probs[v] >= largest * min_p[b]:
                out[b, v] = probs[v]
        out[b] /= out[b].sum()
    return out
