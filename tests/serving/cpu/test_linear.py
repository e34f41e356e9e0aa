"""Packed linears compute what `F.linear` computes, and let go of the unpacked weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.linear import PackedWeight, pack_linears


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 31, 64, 129])
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536), (17, 33)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_equals_plain(
    rows: int, out_features: int, in_features: int, with_bias: bool
) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(out_features, in_features)
    x = torch.randn(rows, in_features)
    bias = torch.randn(out_features) if with_bias else None
    expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Rounding of a sum of K products: about sqrt(K) ulps of the largest partial sum.
    bound = 4e-7 * in_features**0.5 * float(expected.abs().max())
    torch.testing.assert_close(PackedWeight(weight)(x, bias).double(), expected, atol=bound, rtol=0)


def test_rows_of_a_wider_tensor_and_no_rows_at_all() -> None:
    weight = torch.randn(24, 32)
    wide = torch.randn(5, 96)
    torch.testing.assert_close(PackedWeight(weight)(wide[:, 32:64]), linear(wide[:, 32:64], weight))
    assert PackedWeight(weight)(torch.empty(0, 32)).shape == (0, 24)


def test_only_float32_is_packed() -> None:
    with pytest.raises(ValueError, match=r"only float32 weights are packed, not torch\.bfloat16"):
        PackedWeight(torch.randn(8, 8).bfloat16())


class Layer(sgl.LinearBase):  # type: ignore[misc]
    """The part of a parallel linear layer that packing looks at."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(32, 24)
        self.weight = nn.Parameter(torch.randn(24, 32, dtype=dtype), requires_grad=False)


class Head(nn.Module):
    """A tied head: one table for embedding and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 32), requires_grad=False)
        self.quant_method = sgl.UnquantizedEmbeddingMethod()


def test_a_model_is_packed_and_its_linears_freed() -> None:
    model = nn.Module()
    model.first, model.low, model.lm_head = Layer(), Layer(torch.bfloat16), Head()
    weight, table = model.first.weight.data.clone(), model.lm_head.weight.data.clone()
    x = torch.randn(3, 32)
    assert pack_linears(model) == 2
    torch.testing.assert_close(
        model.first.quant_method.apply(model.first, x), linear(x, weight), atol=1e-5, rtol=1e-5
    )
    assert model.first.weight.shape == (24, 32)
    assert model.first.weight.isnan().all()
    assert model.first.weight.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError):
        model.first.weight.data.copy_(weight)
    assert type(model.low.quant_method) is sgl.UnquantizedLinearMethod
    head = model.lm_head
    torch.testing.assert_close(
        head.quant_method.apply(head, x), linear(x, table), atol=1e-5, rtol=1e-5
    )
    ids = torch.tensor([3, 99])
    assert torch.equal(head.quant_method.embedding(head, ids), table[ids])
