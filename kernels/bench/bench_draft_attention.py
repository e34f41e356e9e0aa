"""Times of `draft_attention`, beside torch's attention, SGLang's Triton and FlashInfer's fa2.

One layer of Qwen3-8B: a block of N slots behind L tokens of context, in a pool that keeps its
layers apart. FlashInfer's plan and the masks of the others are made once, as a step does for all
its layers, and are not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from harness import QWEN3_8B, BenchCase, Lazy, Rival, sizes
from torch import Tensor

from specstack_kernels import ops
from specstack_kernels.testing_attention import AttentionInputs
from specstack_kernels.torch_ops.draft_attention import draft_attention as torch_form

MAX_GATHERED = 1 << 19
"""Context tokens of a batch, beyond which torch's copies of them do not fit beside the rest."""
MAX_CONTEXT = 1 << 21
"""Likewise for the pool itself: 16 GiB."""


def make_inputs(
    batch: int, nodes: int, context: int, device: torch.device
) -> tuple[AttentionInputs, Tensor]:
    """Random inputs at full contexts, with the block in the pool as well, and its slots."""
    heads, kv_heads, head_dim = (QWEN3_8B[key] for key in ("heads", "kv_heads", "head_dim"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    columns = context + nodes
    slots = torch.randperm(batch * columns, device=device).view(batch, columns)
    own = slots[:, context:]
    inputs = AttentionInputs(
        normal(batch, nodes, heads, head_dim),
        normal(batch * columns, kv_heads, head_dim),
        normal(batch * columns, kv_heads, head_dim),
        slots[:, :context],
        torch.full((batch,), context, device=device),
        normal(batch, nodes, kv_heads, head_dim),
        normal(batch, nodes, kv_heads, head_dim),
        torch.ones((batch, nodes, nodes), dtype=torch.bool, device=device).tril(),
    )
    inputs.pool_keys[own] = inputs.keys
    inputs.pool_values[own] = inputs.values
    return inputs, own


def flashinfer_run(inputs: AttentionInputs, own: Tensor) -> Callable[[], object]:
    """Our adapter, planned."""
    from specstack_kernels.flashinfer.tree_attention import TreeAttention, TreeAttentionSizes

    (batch, nodes, heads, head_dim), context = inputs.queries.shape, inputs.kv_slots.shape[1]
    sizes = TreeAttentionSizes(batch, nodes, context, heads, inputs.keys.shape[2], head_dim)
    attention = TreeAttention(sizes, inputs.queries.dtype, inputs.queries.device)
    attention.plan(
        inputs.kv_slots, inputs.seq_lens, own, inputs.mask, seq_lens_cpu=[context] * batch
    )
    return partial(attention.run, inputs.queries, inputs.pool_keys, inputs.pool_values)


def sglang_run(inputs: AttentionInputs) -> Callable[[], object]:
    """The kernel of SGLang's Triton backend, as its verify step calls it."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    (batch, nodes), context = inputs.queries.shape[:2], inputs.kv_slots.shape[1]
    queries, device = inputs.queries.flatten(0, 1), inputs.queries.device
    full = ops.pack_tree_mask(inputs.mask, inputs.seq_lens, num_tokens=batch * context)
    steps = torch.arange(batch + 1, device=device)
    return partial(
        extend_attention_fwd,
        queries, inputs.keys.flatten(0, 1), inputs.values.flatten(0, 1), torch.empty_like(queries),
        inputs.pool_keys, inputs.pool_values,
        steps * nodes, steps * context, inputs.kv_slots.flatten(), full.full, True, full.offsets,
        nodes, 1.0, 1.0, sm_scale=inputs.queries.shape[-1] ** -0.5,
    )  # fmt: skip


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Requests of one length, under a causal mask."""
    for batch, nodes, context in product(*sizes(device)):
        if batch * context > MAX_CONTEXT:
            continue
        inputs, own = make_inputs(batch, nodes, context, device)
        rivals: dict[str, Rival] = {}
        if batch * context <= MAX_GATHERED:
            rivals["torch"] = partial(torch_form, *inputs)
        if device.type == "cuda":
            rivals["flashinfer fa2"] = Lazy(partial(flashinfer_run, inputs, own))
            rivals["sglang triton"] = Lazy(partial(sglang_run, inputs))
        attended = 2 * inputs.keys.nbytes * (context + nodes) // nodes
        rest = 2 * inputs.queries.nbytes + inputs.kv_slots.nbytes + inputs.mask.nbytes
        yield BenchCase(
            op="draft_attention",
            shape=f"B{batch} Q{nodes} L{context}",
            run=partial(ops.draft_attention, *inputs),
            num_bytes=attended + rest,
            rivals=rivals,
            num_flops=4 * inputs.queries.numel() * (context + nodes),
        )
