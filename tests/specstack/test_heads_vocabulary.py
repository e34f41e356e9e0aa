"""Draft vocabularies, the target's tables and features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.models.heads.errors import HeadError
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.tables import TargetTables
from specstack.models.heads.vocabulary import DraftVocabulary


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_the_most_frequent_tokens_are_kept_and_ids_go_there_and_back(counts, data) -> None:
    size = data.draw(st.integers(1, len(counts)))
    vocabulary = DraftVocabulary.from_counts(torch.tensor(counts), size)
    order = sorted(range(len(counts)), key=lambda token: (-counts[token], token))
    kept = sorted(order[:size])
    draft_ids = torch.arange(size)
    assert vocabulary.token_ids.tolist() == kept
    assert vocabulary.to_target(draft_ids).tolist() == kept
    assert vocabulary.to_draft(vocabulary.to_target(draft_ids)).tolist() == draft_ids.tolist()
    expected = [kept.index(token) if token in kept else -1 for token in range(len(counts))]
    assert vocabulary.to_draft(torch.arange(len(counts))).tolist() == expected
    assert vocabulary.t2d.tolist() == [token in kept for token in range(len(counts))]


def test_any_shape_of_ids() -> None:
    vocabulary = DraftVocabulary.from_counts(torch.tensor([0, 9, 0, 9]), 2)
    ids = torch.tensor([[[1, 3]], [[0, 2]]])
    assert vocabulary.to_draft(ids).tolist() == [[[0, 1]], [[-1, -1]]]
    assert vocabulary.to_target(torch.tensor([[1], [0]])).tolist() == [[3], [1]]


def test_maps_that_disagree_are_refused() -> None:
    t2d = torch.tensor([True, False, True])
    with pytest.raises(HeadError) as error:
        DraftVocabulary(torch.tensor([0, 0]), t2d)
    assert str(error.value) == "d2t (2 draft tokens) and t2d (2 target tokens) disagree"


@pytest.mark.parametrize("size", [0, 4])
def test_a_size_beyond_the_counts_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^size {size} is not in 1\.\.3, the tokens counted$"):
        DraftVocabulary.from_counts(torch.ones(3), size)


def test_the_fingerprint_names_the_weights_not_their_dtype() -> None:
    tables = TargetTables(torch.randn(300, 8), torch.randn(300, 8))
    name = tables.fingerprint()
    assert tables.to(dtype=torch.bfloat16).fingerprint() == name
    assert tables.to(dtype=torch.bfloat16).to(dtype=torch.float64).fingerprint() == name
    assert TargetTables(tables.embedding, tables.lm_head + 1).fingerprint() != name


def test_tied_tables_are_one_tensor() -> None:
    weights = {"model.embed_tokens.weight": torch.randn(4, 2)}
    tied = TargetTables.from_weights(weights).to(dtype=torch.float64)
    assert tied.are_tied
    head = torch.randn(4, 2)
    untied = TargetTables.from_weights({**weights, "lm_head.weight": head})
    assert torch.equal(untied.lm_head, head)
    assert not untied.are_tied
    with pytest.raises(HeadError) as error:
        TargetTables.from_weights({})
    assert str(error.value) == "the target's weights have no model.embed_tokens.weight"


def test_features_are_indexed_by_token() -> None:
    features = TargetFeatures(torch.randn(2, 5, 3, 4), torch.randn(2, 5, 2, 1, 4))
    row = features.index((0, slice(1, 3)))
    assert torch.equal(row.hidden, features.hidden[0, 1:3])
    assert torch.equal(row.keys, features.keys[0, 1:3])
    assert row.values is None
    assert features.to(dtype=torch.bfloat16).hidden.dtype == torch.bfloat16
