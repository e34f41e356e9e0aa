"""What a head drafter is handed: the right rows, in the right order, of unpadded tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specstack.drafters.base import FeatureNeeds
from specstack.types import AcceptResult
from specstack_serving.features import FeatureReader, draft_batch

VOCAB, HIDDEN, SLOTS = 10, 4, 40


def reader_of(needs: FeatureNeeds, engine: Any, num_ranks: int = 1) -> FeatureReader:
    """Every rank holds the same, which tells parts that were gathered from others."""
    return FeatureReader(needs, engine, lambda part, dim: torch.cat([part] * num_ranks, dim=dim))


class Model:
    """The part of a target that is read; its tables are padded as SGLang pads them."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.embedding = SimpleNamespace(weight=torch.randn(64, HIDDEN))
        self.lm_head = SimpleNamespace(weight=torch.randn(64, HIDDEN))

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.captured = layers

    def get_input_embeddings(self) -> Any:
        return self.embedding


def runner(model: Any) -> SimpleNamespace:
    buffers = {layer: (torch.randn(SLOTS, 2, 3), torch.randn(SLOTS, 2, 3)) for layer in range(4)}
    pool = SimpleNamespace(size=SLOTS - 1, page_size=1, get_kv_buffer=buffers.__getitem__)
    return SimpleNamespace(
        model=model,
        token_to_kv_pool=pool,
        dtype=torch.float32,
        model_config=SimpleNamespace(vocab_size=VOCAB),
    )


def test_tables_end_where_the_vocabulary_does() -> None:
    model = Model()
    runtime = reader_of(FeatureNeeds((1,), ()), runner(model)).runtime(5)
    assert torch.equal(runtime.tables.embedding, model.embedding.weight[:VOCAB])
    assert torch.equal(runtime.tables.lm_head, model.lm_head.weight[:VOCAB])
    assert (runtime.num_kv_slots, runtime.num_slots) == (SLOTS, 5)


def test_ranks_put_tables_and_kv_heads_together() -> None:
    model = Model()
    engine = runner(model)
    needs = FeatureNeeds((), (2,))
    tables = reader_of(needs, engine, num_ranks=2).runtime(5).tables
    assert torch.equal(tables.embedding, model.embedding.weight[:VOCAB])
    assert not tables.are_tied
    alone, together = (reader_of(needs, engine, n).read(None, torch.tensor([3])) for n in (1, 2))
    assert alone.keys is not None
    assert together.keys is not None
    assert torch.equal(together.keys, torch.cat([alone.keys] * 2, dim=2))
    model.lm_head = model.embedding
    assert reader_of(needs, engine, num_ranks=2).runtime(5).tables.are_tied


def test_layers_come_in_the_order_that_was_asked_for() -> None:
    model = Model()
    engine = runner(model)
    reader = reader_of(FeatureNeeds((7, 2), (3, 0)), engine)
    assert model.captured == [2, 7], "the engine captures in the order of its layers"
    hidden, slots = torch.randn(3, 2 * HIDDEN), torch.tensor([9, 4, 30])
    features = reader.read(hidden, slots)
    assert features.hidden is not None
    assert torch.equal(features.hidden[:, 0], hidden[:, HIDDEN:])
    assert torch.equal(features.hidden[:, 1], hidden[:, :HIDDEN])
    for place, layer in enumerate((3, 0)):
        keys, values = engine.token_to_kv_pool.get_kv_buffer(layer)
        assert torch.equal(features.keys[:, place], keys[slots])
        assert torch.equal(features.values[:, place], values[slots])


def test_a_model_without_taps_is_refused() -> None:
    with pytest.raises(ValueError, match="object gives no hidden states of single layers"):
        reader_of(FeatureNeeds((1,), ()), runner(object()))
    reader_of(FeatureNeeds((), (1,)), runner(object()))


def batch(requests: list[tuple[list[int], int, int]]) -> SimpleNamespace:
    """A prefill of (all prompt tokens, cached ones, those computed after this forward)."""
    reqs = [
        SimpleNamespace(
            full_untruncated_fill_ids=tokens, get_fill_ids=lambda t=tokens, e=end: t[:e]
        )
        for tokens, _, end in requests
    ]
    prefix_lens = [prefix for _, prefix, _ in requests]
    num_new = sum(end - prefix for _, prefix, end in requests)
    table = torch.arange(len(requests) * 8).view(len(requests), 8)
    return SimpleNamespace(
        reqs=reqs,
        prefix_lens=prefix_lens,
        out_cache_loc=torch.arange(20, 20 + num_new),
        req_pool_indices=torch.arange(len(requests)),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )


def test_a_prefill_knows_the_token_after_each() -> None:
    """A chunk ends before a known token, a whole prompt before the sampled one."""
    given = batch([([1, 2, 3, 4, 5], 0, 3), ([6, 7, 8], 1, 3)])
    reader = reader_of(FeatureNeeds((), (0,)), runner(object()))
    found = reader.prefilled(given, [4, 2], None, torch.tensor([90, 91]))
    assert found.next_tokens.tolist() == [2, 3, 4, 8, 91]
    assert found.positions.tolist() == [0, 1, 2, 1, 2]
    assert found.requests.tolist() == [0, 0, 0, 1, 1]
    assert found.kv_slots.tolist() == [20, 21, 22, 23, 24]
    assert found.batch.slots == (4, 2)
    assert found.batch.seq_lens.tolist() == [0, 1]
    assert found.batch.kv_slots.tolist() == [[0], [8]]
    assert found.max_new_tokens == 3


def test_a_round_hands_over_the_accepted_paths() -> None:
    """Features are those of the path's nodes, slots those that it was moved to."""
    before = draft_batch(batch([([1], 0, 1), ([1], 0, 1)]), [4, 2], torch.tensor([50, 60]),
                         torch.tensor([5, 7]), 8)  # fmt: skip
    accepted = AcceptResult(
        accept_index=torch.tensor([[0, 2, -1], [0, -1, -1]]),
        accept_lens=torch.tensor([2, 1]),
        emitted=torch.tensor([[51, 52, 0], [61, 0, 0]]),
    )
    window = torch.tensor([[10, 11, 12], [13, 14, 15]])
    hidden = torch.arange(4.0)[:, None].expand(-1, HIDDEN)
    rows = torch.tensor([[0, 1, 2], [3, 3, 3]])  # request 1 has a root alone
    reader = reader_of(FeatureNeeds((1,), ()), runner(Model()))
    found = reader.verified(before, window, hidden, rows, accepted)
    real = found.requests >= 0
    assert found.requests.tolist() == [0, 0, -1, 1, -1, -1]
    assert found.features.hidden[real, 0, 0].tolist() == [0.0, 2.0, 3.0]
    assert found.next_tokens[real].tolist() == [51, 52, 61]
    assert found.positions[real].tolist() == [5, 6, 7]
    assert found.kv_slots[real].tolist() == [10, 11, 13]


def test_features_of_plain_rounds_outlive_the_engines_buffer() -> None:
    """They may wait for many rounds; a captured graph writes each one's output to one place."""
    before = draft_batch(batch([([1], 0, 1), ([1], 0, 1)]), [4, 2], torch.tensor([50, 60]),
                         torch.tensor([5, 7]), 8)  # fmt: skip
    accepted = AcceptResult(
        accept_index=torch.tensor([[0], [0]]),
        accept_lens=torch.tensor([1, 1]),
        emitted=torch.tensor([[51], [61]]),
    )
    buffer = torch.arange(4.0)[:, None].repeat(1, HIDDEN)  # two rows are a graph's padding
    reader = reader_of(FeatureNeeds((1,), ()), runner(Model()))
    found = reader.verified(
        before, torch.tensor([[10], [13]]), buffer, torch.tensor([[0], [1]]), accepted
    )
    buffer.fill_(-1.0)
    assert found.features.hidden[:, 0, 0].tolist() == [0.0, 1.0]
