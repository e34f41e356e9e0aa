"""Vectorised twin of `reference.filter_probs`: one sort of values, left out when nobody needs it.

Both cuts keep the first ranks, so the number of survivors and the smallest surviving probability
say who survives: the sort needs no indices and nothing is scattered back.
"""

from __future__ import annotations

import numpy as np
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
    """Return what each request samples from. Host sync: none.

    Args:
        use_top_k_top_p: False leaves the two sorting filters out, for batches without them.
    """
    probs = torch.softmax(logits / temperature[:, None], dim=-1)
    if use_top_k_top_p:
        probs = _apply_top_k_top_p(probs, top_k, top_p)
    floor = probs.amax(dim=-1, keepdim=True) * min_p[:, None]
    probs = probs.masked_fill(probs < floor, 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def _apply_top_k_top_p(
    probs: Float[Tensor, "B V"], top_k: Int[Tensor, " B"], top_p: Float[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    """Zero what either cut drops; both look at the unfiltered probabilities."""
    negated = _sort_ascending(-probs)  # [B, V]
    mass_before = negated - negated.cumsum(dim=-1)
    max_mass = top_p.masked_fill(top_p >= 1.0, torch.inf).to(probs.dtype)
    num_kept = torch.searchsorted(mass_before, max_mass[:, None], right=True)
    num_kept = torch.minimum(num_kept, top_k[:, None])
    smallest = negated.gather(-1, num_kept - 1)  # [B, 1], negated
    num_above = torch.searchsorted(negated, smallest)
    is_tied = probs == -smallest
    is_kept_tie = is_tied & (is_tied.cumsum(dim=-1, dtype=torch.int32) <= num_kept - num_above)
    return probs.masked_fill(~(is_kept_tie | (probs > -smallest)), 0.0)


def _sort_ascending(values: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """Sort rows. On the CPU numpy's vectorised sort takes a twentieth of torch's time."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values
