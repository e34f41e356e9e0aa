"""Times of `context_kv`: the committed tokens of a round, and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import QWEN3_8B, BenchCase, Lazy, Rival, sizes
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from specstack_kernels import ops
from specstack_kernels.testing_rows import RandomRows, random_rows
from specstack_kernels.torch_ops.context_kv import context_kv as torch_form

EPS = 1e-6
LAYERS = (1, 5)
"""A light head, and DFlash's."""
COMMITTED = 8
"""Rows of a request and round, live or not."""


def cases(device: torch.device) -> Iterator[BenchCase]:
    """T = B * COMMITTED of a round and T of a prompt, at the sizes of Qwen3-8B."""
    batches, _, contexts = sizes(device)
    for layers in LAYERS if device.type == "cuda" else LAYERS[:1]:
        for num_tokens in (*(COMMITTED * batch for batch in batches), *contexts):
            yield _case(num_tokens, layers, device)


def _case(num_tokens: int, layers: int, device: torch.device) -> BenchCase:
    hidden, heads, head_dim = (QWEN3_8B[key] for key in ("hidden", "kv_heads", "head_dim"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = random_rows(num_tokens, layers, heads, head_dim, dtype, kept=1.0).to(device)
    weights = torch.randn(2, layers, heads * head_dim, hidden, device=device) / hidden**0.5
    inputs = tuple(
        x.to(dtype)
        for x in (
            torch.randn(num_tokens, hidden, device=device),
            torch.ones(layers, hidden, device=device),
            *weights,
            torch.ones(layers, head_dim, device=device),
        )
    )
    written = 2 * num_tokens * layers * heads * head_dim * dtype.itemsize
    rivals: dict[str, Rival] = {"torch": partial(torch_form, *inputs, *rows, eps=EPS)}
    if device.type == "cuda":
        rivals["sglang, input norm apart"] = Lazy(partial(_sglang, inputs, rows))
    return BenchCase(
        op="context_kv",
        shape=f"T{num_tokens} n{layers} D{hidden} G{heads} C{head_dim}",
        run=partial(ops.context_kv, *inputs, *rows, eps=EPS),
        num_bytes=written + sum(x.nbytes for x in (*inputs, *rows[:4])),
        rivals=rivals,
        num_flops=4 * num_tokens * hidden * layers * heads * head_dim,
    )


def _sglang(inputs: tuple[Tensor, ...], rows: RandomRows) -> Callable[[], object]:
    """Its DFlash worker: one product for all layers, a kernel for norm and RoPE, writes."""
    from sglang.kernels.ops.speculative.fused_kv_materialize import _fused_norm_rope_stacked

    fused, norm_weight, k_weight, v_weight, k_norm_weight = inputs
    layers, heads, head_dim = rows.pool_keys.shape[1:]
    weight = torch.cat([k_weight, v_weight], dim=1).flatten(0, 1)  # [n 2 G C, D]
    half = head_dim // 2
    angles = torch.cat([rows.cos[:, :half], rows.sin[:, :half]], dim=1)
    positions = torch.arange(len(fused), device=fused.device)
    eps = torch.full((layers,), EPS, device=fused.device)

    def run() -> None:
        normed = rms_norm(fused, fused.shape[1:], norm_weight[0], EPS)
        projected = linear(normed, weight).unflatten(1, (layers, -1))
        keys, values = _fused_norm_rope_stacked(
            projected, k_norm_weight, eps, angles, positions, heads, head_dim, head_dim
        )
        for layer in range(layers):
            rows.pool_keys[:, layer][rows.kv_slots] = keys[layer]
            rows.pool_values[:, layer][rows.kv_slots] = values[layer]

    return run
