"""Packed linears compute what `F.linear` computes, and let go of the unpacked weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from specstack.drafters.autoregressive import AutoregressiveDrafter
from specstack.drafters.base import DraftRuntime
from specstack.drafters.block import BlockDrafter
from specstack.models.heads.base import LmHead
from specstack.models.heads.checkpoint import Head as DraftHead
from specstack.models.heads.checkpoint import make_head, save_head
from specstack.models.heads.testing import (
    GATED_LINEAR,
    HIDDEN,
    KV_LINEAR,
    SUM_LOW_RANK,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)
from specstack.models.heads.vocabulary import DraftVocabulary
from specstack.types import CommittedTokens, DraftBatch, DraftProposal
from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.linear import PackedLinear, PackedWeight, pack_head, pack_linears


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


def conditioned(kind: str, parent: str, output: str) -> dict[str, Any]:
    return {"conditioning": {"kind": kind, "rank": 3, "parent": parent, "output": output}}


DRAFT_HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "block": ("block", HIDDEN, {}),
    "kv": ("block", KV_LINEAR, conditioned("markov", "table", "logits")),
    "gru": ("block", HIDDEN, conditioned("gru", "embedding", "hidden")),
    "gru table": ("block", SUM_LOW_RANK, conditioned("gru", "table", "logits")),
    "seeded": ("block", HIDDEN, {"slots": "seeded", **conditioned("gru", "embedding", "hidden")}),
    "autoregressive": ("autoregressive", HIDDEN, {"extra_norms": True}),
    "gated": ("autoregressive", GATED_LINEAR, {}),
}


def draft_head(name: str) -> DraftHead:
    form, context, fields = DRAFT_HEADS[name]
    torch.manual_seed(0)
    config = tiny_config(form, context, draft_vocab_size=12, **fields)
    vocabulary = DraftVocabulary.from_counts(torch.rand(40), 12)
    head = make_head(config, random_tables(config, torch.float32), vocabulary)
    randomise(head, 0.2)
    return head.requires_grad_(False).eval()


def drafted(head: DraftHead, folder: Path, prepare: Any) -> tuple[Any, DraftProposal]:
    """The head of a drafter after it has absorbed five tokens, and its proposal."""
    save_head(head, folder)
    kind = BlockDrafter if head.config.form == "block" else AutoregressiveDrafter
    drafter = kind(str(folder), max_depth=3)
    torch.manual_seed(0)
    tables = random_tables(head.config, torch.float32)
    runtime = DraftRuntime(tables, 9, 1, torch.device("cpu"), torch.float32, prepare)
    drafter.attach(runtime)
    places, none = torch.arange(5), torch.zeros(1, 0, dtype=torch.int64)
    features = random_features(head.config, 5, dtype=torch.float32)
    before = DraftBatch((0,), torch.tensor([7]), torch.tensor([0]), none)
    drafter.absorb(CommittedTokens(features, places + 3, places, places, 0 * places, before, 5))
    batch = DraftBatch((0,), torch.tensor([7]), torch.tensor([5]), places[None])
    return drafter._head, drafter.propose(batch, 9)


@pytest.mark.parametrize("name", DRAFT_HEADS)
def test_a_packed_head_drafts_what_the_plain_one_does(name: str, tmp_path: Path) -> None:
    head = draft_head(name)
    plain, expected = drafted(head, tmp_path, None)
    packed, found = drafted(head, tmp_path, pack_head)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.parent_index, expected.parent_index)
    torch.testing.assert_close(found.log_q, expected.log_q, atol=1e-5, rtol=1e-5)
    linears = {n: m for n, m in plain.named_modules() if isinstance(m, nn.Linear | LmHead)}
    assert {n for n, m in packed.named_modules() if isinstance(m, PackedLinear)} == set(linears)
    randomise(head, 0.2)
    other = drafted(head, tmp_path, pack_head)[1]
    assert not torch.allclose(other.log_q, expected.log_q, atol=1e-2), "control: another head"


@pytest.mark.parametrize("name", ["block", "gru", "gru table"])
def test_rows_of_a_packed_head_can_be_read(name: str) -> None:
    plain, packed = draft_head(name), draft_head(name)
    pack_head(packed)
    ids = torch.tensor([3, 11])
    assert torch.equal(packed.lm_head.weight[ids], plain.lm_head.weight[ids])
    if name != "block":
        up = packed.corrector.up
        assert isinstance(up, PackedLinear)
        assert torch.equal(up.weight, plain.corrector.up.weight)
    x = torch.randn(3, 24)
    expected = plain.lm_head(x)
    packed.lm_head.weight.zero_()
    torch.testing.assert_close(packed.lm_head(x), expected, atol=1e-5, rtol=1e-5)
    plain.lm_head.weight.zero_()
    assert not plain.lm_head(x).any(), "control: a plain one reads its weight"


def test_layers_of_a_head_in_bfloat16_stay() -> None:
    head = draft_head("gated")
    low = head.layers[1].mlp.bfloat16()
    kinds = [type(module) for module in low.modules()]
    pack_head(head)
    assert [type(module) for module in low.modules()] == kinds
    assert type(head.layers[0].mlp.up_proj) is PackedLinear
    whole = draft_head("gated").bfloat16()
    pack_head(whole)
    assert not any(isinstance(module, PackedLinear) for module in whole.modules())
