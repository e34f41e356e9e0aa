"""Heads on disk: what comes back, what is stored, and every refusal's text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specstack.models.heads.block import BlockHead
from specstack.models.heads.checkpoint import load_head, make_head, read_head_config, save_head
from specstack.models.heads.errors import HeadError
from specstack.models.heads.rotary import Rotary
from specstack.models.heads.tables import TargetTables
from specstack.models.heads.testing import (
    GATED,
    HIDDEN,
    KV_LINEAR,
    SUM,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)
from specstack.models.heads.vocabulary import DraftVocabulary

HEADS = {
    "block": ("block", HIDDEN, {"conditioning": {"kind": "gru", "rank": 4}}),
    "block_sum": ("block", SUM, {}),
    "block_seeded": ("block", HIDDEN, {"slots": "seeded"}),
    "autoregressive": ("autoregressive", HIDDEN, {"extra_norms": True}),
    "autoregressive_kv": ("autoregressive", KV_LINEAR, {}),
    "autoregressive_gated": ("autoregressive", GATED, {}),
}


def make(name: str, draft_vocab_size: int | None = 12, *, scale: float = 1.0):
    """A head with weights of its own; `scale` of the random part."""
    form, context, fields = HEADS[name]
    torch.manual_seed(0)
    config = tiny_config(form, context, draft_vocab_size=draft_vocab_size, **fields)
    tables = random_tables(config, torch.float32)
    vocabulary = None
    if draft_vocab_size:
        vocabulary = DraftVocabulary.from_counts(torch.rand(40), draft_vocab_size)
    head = make_head(config, tables, vocabulary)
    randomise(head, scale)
    return head, tables


def logits(head, dtype=torch.float32):
    """Logits of some slots or inputs after three tokens of context."""
    torch.manual_seed(1)
    features = random_features(head.config, 1, 3, dtype=dtype)
    context = head.context(features, torch.arange(3)[None])
    tokens, positions = torch.tensor([[5, 6]]), torch.tensor([[3, 4]])
    if isinstance(head, BlockHead):
        mask = torch.ones(1, 2, 5, dtype=torch.bool).tril(3)
        parents = tokens if head.corrector else None
        slots, seed = torch.tensor([[5, -1]]), None
        if head.is_seeded:
            seed = head.fuse(features)[:, -1:].expand(-1, 2, -1)
        return head.logits(head(slots, positions, context, mask, seed), parents)
    columns = 5 if context else 2
    mask = torch.ones(1, 2, columns, dtype=torch.bool).tril(columns - 2)
    hidden = head.fuse(features)[:, :2]
    self_mask = torch.ones(1, 2, 2, dtype=torch.bool).tril() if head.is_gated else None
    return head.logits(head(tokens, hidden, positions, None, context, mask, self_mask)[0])


@pytest.mark.parametrize("draft_vocab_size", [None, 12])
@pytest.mark.parametrize("name", HEADS)
def test_a_loaded_head_gives_equal_logits(name, draft_vocab_size, tmp_path: Path) -> None:
    head, tables = make(name, draft_vocab_size)
    save_head(head, tmp_path / "head", card="# A head\n")
    loaded = load_head(tmp_path / "head", tables, torch.float32)
    assert loaded.config == head.config
    assert torch.equal(logits(loaded), logits(head))
    assert (tmp_path / "head/README.md").read_text() == "# A head\n"


def test_tables_are_never_stored_and_vocabularies_are(tmp_path: Path) -> None:
    head, _ = make("block")
    save_head(head, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == {*dict(head.named_parameters()), "d2t", "t2d"}
    assert not (tmp_path / "README.md").exists()
    assert all(tensor.shape[0] != 40 for name, tensor in stored.items() if name != "t2d")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Close to float32 where the weights are as mild as trained ones; frequencies stay exact."""
    head, tables = make(name, scale=0.2)
    exact = logits(head)
    save_head(head.to(torch.bfloat16), tmp_path)
    loaded = load_head(tmp_path, tables, torch.bfloat16)
    found = logits(loaded, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert torch.equal(found, logits(head, torch.bfloat16))
    assert torch.equal(loaded.rotary.inv_freq, Rotary(head.config.target).inv_freq)
    assert (found.float() - exact).norm() < 0.03 * exact.norm()


@pytest.fixture
def saved(tmp_path: Path):
    head, tables = make("block")
    save_head(head, tmp_path)
    return tmp_path, tables


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refusal(folder: Path, tables: TargetTables) -> str:
    with pytest.raises(HeadError) as error:
        load_head(folder, tables)
    return str(error.value).replace(str(folder), "HEAD")


def test_tensors_that_do_not_fit_are_all_named(saved) -> None:
    folder, tables = saved

    def change(tensors) -> None:
        del tensors["layers.1.self_attn.q_norm.weight"]
        tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["fusion.norm.weight"] = torch.zeros(23)

    rewrite(folder, change)
    assert refusal(folder, tables) == (
        "HEAD/model.safetensors does not fit config.json beside it:\n"
        "  missing: layers.1.self_attn.q_norm.weight\n"
        "  unexpected: layers.2.mlp.up_proj.weight\n"
        "  fusion.norm.weight: shape (23,), the config asks for (24,)"
    )


def test_a_target_of_other_sizes_is_refused(saved) -> None:
    folder, _ = saved
    tables = TargetTables(torch.zeros(41, 24), torch.zeros(41, 24))
    assert refusal(folder, tables) == (
        "the head drafts for tiny with 40 tokens of size 24; this target's embedding is 41 x 24"
    )
    tables = TargetTables(torch.zeros(40, 24), torch.zeros(40, 20))
    assert refusal(folder, tables) == (
        "the head drafts for tiny with 40 tokens of size 24; this target's lm_head is 40 x 20"
    )


def test_another_target_of_the_same_sizes_is_refused(saved) -> None:
    folder, tables = saved
    config = json.loads((folder / "config.json").read_text())
    reconfigure(folder, target={**config["target"], "fingerprint": tables.fingerprint()})
    load_head(folder, tables)
    load_head(folder, tables.to(dtype=torch.bfloat16))
    other = TargetTables(tables.embedding + 1, tables.lm_head)
    assert refusal(folder, other) == (
        f"the head was trained with tiny of fingerprint {tables.fingerprint()}; "
        f"this target has the same sizes but other weights (fingerprint {other.fingerprint()})"
    )
    smaller = TargetTables(tables.embedding[:, :20], tables.lm_head[:, :20])
    assert refusal(folder, smaller).endswith("this target's embedding is 40 x 20")


def test_a_vocabulary_that_does_not_fit_is_refused(saved) -> None:
    folder, tables = saved
    stored = load_file(folder / "model.safetensors")
    rewrite(folder, lambda tensors: tensors.update(d2t=stored["d2t"][:-1].clone()))
    assert refusal(folder, tables) == (
        "HEAD/config.json asks for d2t of shape (12,), model.safetensors has (11,)"
    )
    rewrite(folder, lambda tensors: tensors.update(d2t=stored["d2t"] + 1))
    assert refusal(folder, tables) == ("d2t (12 draft tokens) and t2d (12 target tokens) disagree")
    rewrite(folder, lambda tensors: tensors.pop("d2t"))
    assert refusal(folder, tables) == (
        "HEAD/config.json asks for d2t of shape (12,), model.safetensors has none"
    )


def test_a_config_that_is_not_a_heads_is_refused(saved) -> None:
    folder, tables = saved
    reconfigure(folder, num_layers=0, nonsense=1)
    assert refusal(folder, tables) == (
        "HEAD/config.json is not a head's:\n"
        "  num_layers: Input should be greater than 0\n"
        "  nonsense: Extra inputs are not permitted"
    )
    reconfigure(folder, model_type="llama")
    assert refusal(folder, tables) == (
        "HEAD/config.json has model_type 'llama', a draft head has 'specstack_head'"
    )
    (folder / "config.json").write_text("{")
    assert refusal(folder, tables).startswith("cannot read HEAD/config.json: ")
    (folder / "config.json").unlink()
    assert refusal(folder, tables) == "HEAD has no config.json: it is not a draft head"


def test_a_contradiction_in_a_file_is_the_sentence_of_the_rule(saved) -> None:
    folder, _ = saved
    reconfigure(folder, mask="bidirectional", form="autoregressive", conditioning={"kind": "none"})
    with pytest.raises(HeadError) as error:
        read_head_config(folder)
    assert str(error.value).splitlines()[1:] == ["  mask bidirectional needs form block"]


def test_weights_that_are_missing_or_broken_are_refused(saved) -> None:
    folder, tables = saved
    (folder / "model.safetensors").write_bytes(b"x" * 20)
    assert refusal(folder, tables).startswith("cannot read HEAD/model.safetensors: ")
    (folder / "model.safetensors").unlink()
    assert refusal(folder, tables) == "HEAD has no model.safetensors"


def test_a_new_head_needs_the_vocabulary_of_its_config() -> None:
    config = tiny_config(draft_vocab_size=12)
    tables = random_tables(config)
    with pytest.raises(HeadError) as error:
        make_head(config, tables)
    assert str(error.value) == (
        "the config has draft_vocab_size 12; the vocabulary given has no draft tokens"
    )
    with pytest.raises(HeadError) as error:
        make_head(config, tables, DraftVocabulary.from_counts(torch.rand(39), 12))
    assert str(error.value) == "tiny has 40 tokens; the draft vocabulary was made for 39"
