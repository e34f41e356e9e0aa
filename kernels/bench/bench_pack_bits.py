"""Times of `pack_bits` over full masks, beside FlashInfer's, which reads a length on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import BenchCase, Lazy, Rival, sizes
from torch import Tensor

from specstack_kernels import ops
from specstack_kernels.reference.pack_bits import count_mask_bytes
from specstack_kernels.torch_ops.pack_bits import pack_bits as torch_form

MAX_FLAGS = 1 << 28
"""Larger masks than a server would hold are left out."""


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Requests of one length; one more token than a multiple of 8, as lengths are not."""
    batches, nodes, contexts = sizes(device)
    for batch in batches:
        for num_nodes in nodes:
            for context in contexts:
                if batch * num_nodes * (context + 1 + num_nodes) <= MAX_FLAGS:
                    yield _case(batch, num_nodes, context + 1, device)


def _case(batch: int, nodes: int, context: int, device: torch.device) -> BenchCase:
    flags_of_request = nodes * (context + nodes)
    full = torch.ones(batch * flags_of_request, dtype=torch.bool, device=device)
    offsets = torch.arange(batch + 1, device=device) * flags_of_request
    num_bytes = count_mask_bytes([context] * batch, nodes)
    rivals: dict[str, Rival] = {"torch": partial(torch_form, full, offsets, num_bytes=num_bytes)}
    if device.type == "cuda":
        rivals["flashinfer segment_packbits"] = Lazy(partial(_flashinfer, full, offsets))
    return BenchCase(
        op="pack_bits",
        shape=f"B{batch} N{nodes} L{context}",
        run=partial(ops.pack_bits, full, offsets, num_bytes=num_bytes),
        num_bytes=len(full) + num_bytes + 16 * (batch + 1),
        rivals=rivals,
    )


def _flashinfer(full: Tensor, offsets: Tensor) -> Callable[[], object]:
    from flashinfer.quantization import segment_packbits

    return partial(segment_packbits, full, offsets, bitorder="little")
