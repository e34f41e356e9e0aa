"""Chains of drafts that were drawn from laws near the target's, and settings to verify them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from harness import QWEN3_8B
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.testing import RandomSampling

DRAFTS, CANDIDATES = 8, 64
ALL = 1 << 30
FILTERS = {"temperature": (ALL, 1.0), "top-k 20 top-p 0.95": (20, 0.95)}
"""top-k, top-p."""


class DrawnChain(NamedTuple):
    """All nodes live; C candidates are the target's most probable tokens."""

    draft_tokens: Int[Tensor, "B N"]
    parent_index: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    law_tokens: Int[Tensor, "B N C"]
    law_probs: Float[Tensor, "B N C"]
    logits: Float[Tensor, "T V"]
    logit_rows: Int[Tensor, "B N"]


def drawn_chain(batch: int, device: torch.device) -> DrawnChain:
    """Return random chains of DRAFTS drafts."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    nodes = DRAFTS + 1
    logits = 3 * torch.randn((batch * nodes, QWEN3_8B["vocab"]), device=device, dtype=dtype)
    best = logits.float().topk(CANDIDATES)
    probs = torch.softmax(best.values + 0.5 * torch.randn_like(best.values), dim=-1)
    drawn = best.indices.gather(1, torch.multinomial(probs, 1)).view(batch, nodes)
    return DrawnChain(
        drawn.roll(1, dims=1),
        torch.arange(-1, DRAFTS, device=device).repeat(batch, 1),
        torch.full((batch,), nodes, device=device),
        best.indices.view(batch, nodes, CANDIDATES),
        probs.view(batch, nodes, CANDIDATES),
        logits,
        torch.arange(batch * nodes, device=device).view(batch, nodes),
    )


def settings(batch: int, filters: str, device: torch.device) -> RandomSampling:
    """Equal settings for all requests."""
    values = (1.0, *FILTERS[filters], 0.0)
    return RandomSampling(*(torch.full((batch,), value, device=device) for value in values))
