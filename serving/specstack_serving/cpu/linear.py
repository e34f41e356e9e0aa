"""Linear layers over weights packed once for oneDNN.

`F.linear` repacks (or reads badly) the weight on every call: between 2 and 16 rows a plain layer
costs twice a packed one; a packed layer costs nearly the same for 1 and for 8 rows, which is what
makes a verify step about as cheap as a decode step. Only float32 is packed: it is the precision
the CPU platform is for, as bfloat16 has no native path on AVX2; other layers stay as they are.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specstack.models.heads.base import LmHead
from specstack_serving import sglang_compat as sgl

logger = logging.getLogger(__name__)

# oneDNN chooses the blocking for this many rows. One blocking serves all row counts; the one
# chosen for a single row is 15 to 90 % slower above it.
PACK_ROWS = 8


class PackedWeight:
    """An [out, in] float32 matrix in oneDNN's own blocked layout."""

    def __init__(self, weight: Float[Tensor, "O I"]) -> None:
        if weight.dtype != torch.float32:
            raise ValueError(f"only float32 weights are packed, not {weight.dtype}")
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), PACK_ROWS
        )

    def __call__(
        self, x: Float[Tensor, "... I"], bias: Float[Tensor, " O"] | None = None
    ) -> Float[Tensor, "... O"]:
        """x @ weight.T + bias."""
        return torch.ops.mkldnn._linear_pointwise(x, self._blocked, bias, "none", [], "")


class PackedLinearMethod(sgl.UnquantizedLinearMethod):  # type: ignore[misc]
    """Replaces `UnquantizedLinearMethod` on one layer and takes over its weight."""

    def __init__(self, layer: Any) -> None:
        self.packed = PackedWeight(layer.weight)
        # Keeps shape and dtype for code that looks at them and frees the values: a reader gets
        # NaN, a writer (a weight update) an error, instead of something stale.
        layer.weight.data = torch.full((1, 1), float("nan")).expand(layer.weight.shape)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.packed(x, bias)


class PackedHeadMethod(sgl.UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Replaces `UnquantizedEmbeddingMethod` on a language-model head.

    The unpacked table stays: a tied head also embeds with it, and drafters take rows of it.
    """

    def __init__(self, layer: Any) -> None:
        self.packed = PackedWeight(layer.weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.packed(x, bias)


class PackedLinear(nn.Module):
    """A linear layer of a draft head; its weight stays for who reads rows of it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.packed = PackedWeight(weight)

    def forward(self, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        return self.packed(x, self.bias)


def pack_head(head: nn.Module) -> None:
    """Pack the linear layers of a draft head, its lm_head included; others than float32 stay."""
    for parent in list(head.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear | LmHead) or child.weight.dtype != torch.float32:
                continue
            bias = child.bias if isinstance(child, nn.Linear) else None
            setattr(parent, name, PackedLinear(child.weight, bias))


def pack_linears(model: nn.Module) -> int:
    """Pack every unquantized float32 linear layer and the head of `model`; returns how many."""
    packed = 0
    for module in model.modules():
        if (
            isinstance(module, sgl.LinearBase)
            and type(module.quant_method) is sgl.UnquantizedLinearMethod
            and module.weight.dtype == torch.float32
        ):
            module.quant_method = PackedLinearMethod(module)
            packed += 1
    head = getattr(model, "lm_head", None)
    if (
        head is not None
        and type(getattr(head, "quant_method", None)) is sgl.UnquantizedEmbeddingMethod
        and head.weight.dtype == torch.float32
    ):
        head.quant_method = PackedHeadMethod(head)
        packed += 1
    logger.info("packed %d linear layers for oneDNN", packed)
    return packed
