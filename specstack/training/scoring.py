"""Losses of many rows over a large vocabulary in little memory: gradients chunk by chunk.

`chunked_sum` computes gradients while it computes the loss and frees each chunk's logits, so that
the logits of all rows never exist together and none are computed twice. Letters: N rows,
D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Score = Callable[[slice, list[Tensor]], Tensor]
"""From a range of rows and their inputs to the sum of their losses, a scalar."""


def chunked_sum(
    score: Score, inputs: Sequence[Tensor], weights: Sequence[Tensor], chunk_rows: int
) -> Tensor:
    """Sum `score` over chunks of rows; differentiable in `inputs` (rows first) and `weights`.

    Args:
        score: may use nothing else that needs a gradient.
    """
    num_rows = len(inputs[0])
    chunks = [slice(i, min(i + chunk_rows, num_rows)) for i in range(0, num_rows, chunk_rows)]
    if not chunks:  # a sum that is zero, yet reaches every weight
        return sum((0.0 * tensor.sum() for tensor in (*inputs, *weights)), torch.zeros(()))
    if not torch.is_grad_enabled():
        return torch.stack([score(chunk, [x[chunk] for x in inputs]) for chunk in chunks]).sum()
    total: Tensor = _ChunkedSum.apply(score, chunks, len(inputs), *inputs, *weights)
    return total


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, score: Score, chunks: list[slice], num_inputs: int, *tensors: Tensor
    ) -> Tensor:
        inputs, weights = tensors[:num_inputs], tensors[num_inputs:]
        grads = [torch.zeros_like(tensor) for tensor in tensors]
        total = inputs[0].new_zeros((), dtype=torch.float32)
        for chunk in chunks:
            with torch.enable_grad():
                rows = [x[chunk].detach().requires_grad_() for x in inputs]
                loss = score(chunk, rows)
            found = torch.autograd.grad(loss, [*rows, *weights], allow_unused=True)
            total += loss.detach()
            for i, grad in enumerate(found):
                if grad is not None:
                    (grads[i][chunk] if i < num_inputs else grads[i]).add_(grad)
        ctx.grads = grads
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return (None, None, None, *(grad * grad_outputs[0] for grad in ctx.grads))
