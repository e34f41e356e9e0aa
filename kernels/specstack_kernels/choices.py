"""Which implementation of an op runs on which device: pure data, without torch.

`ops` follows it, and `specstack explain` prints it. `torch` is the vectorised form that runs
everywhere; there is no silent fallback from one to the other.
"""

from __future__ import annotations

TORCH, TRITON = "torch", "triton"

GPU_KERNELS = (
    "accept_block",
    "accept_greedy",
    "accept_rejection",
    "best_nodes",
    "best_prefixes",
    "context_kv",
    "draft_attention",
    "filter_probs",
    "link_tree",
    "mix_kv",
    "move_kv",
    "pack_bits",
    "pack_tree_mask",
    "sample_and_walk",
    "score_frontier",
    "sum_kv",
    "top_tokens",
)
"""Ops with a Triton kernel."""
TORCH_ONLY = ("accept_typical", "accumulate_log_q", "invert_cdf", "path_slots")
"""Ops without one."""


def implementations(device: str) -> dict[str, str]:
    """Return {op: implementation} on a device, `cpu` or `cuda`."""
    on_gpu = TRITON if device == "cuda" else TORCH
    found = dict.fromkeys(GPU_KERNELS, on_gpu) | dict.fromkeys(TORCH_ONLY, TORCH)
    return dict(sorted(found.items()))
