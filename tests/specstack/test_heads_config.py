"""Configs of heads: defaults, files, and the sentences that a contradiction gives."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specstack.models.catalogue import CATALOGUE
from specstack.models.heads.config import HeadConfig, TargetShape
from specstack.models.heads.errors import HeadError
from specstack.models.heads.testing import GATED, HIDDEN, KV, KV_LINEAR, SUM, TARGET, tiny_config

MARKOV = {"kind": "markov", "rank": 4}
CONFIGS = {
    "block": ("block", HIDDEN, {"conditioning": MARKOV, "draft_vocab_size": 16}),
    "bidirectional": ("block", KV, {"mask": "bidirectional"}),
    "sum": ("block", {**SUM, "sum_rank": 2}, {"conditioning": {"kind": "refresh"}}),
    "seeded": ("block", HIDDEN, {"slots": "seeded", "conditioning": MARKOV}),
    "autoregressive": ("autoregressive", HIDDEN, {"extra_norms": True}),
    "kv": ("autoregressive", KV_LINEAR, {}),
    "gated": ("autoregressive", GATED, {}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_survives_its_file(name: str) -> None:
    form, context, fields = CONFIGS[name]
    config = tiny_config(form, context, **fields)
    assert HeadConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("form", "context", "fields", "sentence"),
    [
        ("block", {"source": "hidden"}, {}, "context.source hidden needs context.target_layers"),
        (
            "block",
            {**KV, "target_layers": (1,)},
            {},
            "context.source kv takes no context.target_layers: it reads no hidden states",
        ),
        (
            "block",
            {"source": "kv", "kv_layers": (1,)},
            {},
            "context.source kv needs context.kv_layers and context.kv_mix",
        ),
        (
            "block",
            {**HIDDEN, "kv_layers": (1,)},
            {},
            "context.source hidden takes no context.kv_layers and no context.kv_mix",
        ),
        (
            "block",
            KV,
            {"num_layers": 3},
            "context.kv_mix paired needs one of context.kv_layers per draft layer: 2 for 3 layers",
        ),
        (
            "block",
            GATED,
            {},
            "context.source hybrid of the block form needs context.fusion sum",
        ),
        (
            "autoregressive",
            SUM,
            {},
            "context.source hybrid of the autoregressive form needs context.fusion gated_delta",
        ),
        (
            "block",
            {**HIDDEN, "fusion": "sum"},
            {},
            "context.source hidden of the block form needs context.fusion none",
        ),
        (
            "block",
            {**SUM, "kv_mix": "linear"},
            {},
            "context.fusion sum needs context.kv_mix paired: A_i maps one target layer",
        ),
        ("block", {**KV, "sum_rank": 2}, {}, "context.sum_rank belongs to context.fusion sum"),
        (
            "block",
            {**HIDDEN, "target_layers": (1, 6)},
            {},
            "context.target_layers names layer 6, tiny has layers 0 to 5",
        ),
        (
            "block",
            {**KV, "kv_layers": (9, 2)},
            {},
            "context.kv_layers names layer 9, tiny has layers 0 to 5",
        ),
        (
            "autoregressive",
            HIDDEN,
            {"mask": "bidirectional"},
            "mask bidirectional needs form block",
        ),
        (
            "autoregressive",
            HIDDEN,
            {"conditioning": MARKOV},
            "conditioning.kind markov needs form block: "
            "an autoregressive head reads the path itself",
        ),
        (
            "block",
            HIDDEN,
            {"conditioning": {"kind": "gru"}},
            "conditioning.kind gru needs a conditioning.rank",
        ),
        (
            "block",
            HIDDEN,
            {"conditioning": {"kind": "none", "rank": 4}},
            "conditioning.kind none takes no conditioning.rank",
        ),
        (
            "block",
            HIDDEN,
            {"mask": "bidirectional", "conditioning": {"kind": "refresh"}},
            "conditioning.kind refresh needs mask tree_causal",
        ),
        (
            "autoregressive",
            HIDDEN,
            {"slots": "seeded"},
            "slots seeded needs form block: an autoregressive head always starts like this",
        ),
        (
            "block",
            KV,
            {"slots": "seeded"},
            "slots seeded needs hidden states, which context.source kv does not read",
        ),
        (
            "block",
            HIDDEN,
            {"slots": "seeded", "conditioning": {"kind": "refresh"}},
            "conditioning.kind refresh needs slots masked: it asks behind every node",
        ),
        (
            "block",
            HIDDEN,
            {"extra_norms": True},
            "extra_norms needs form autoregressive: a block feeds no hidden state back",
        ),
        (
            "block",
            HIDDEN,
            {"draft_vocab_size": 41},
            "draft_vocab_size 41 exceeds the 40 tokens of tiny",
        ),
        (
            "block",
            HIDDEN,
            {"target": {"num_heads": 3}},
            "num_heads 3 is no multiple of num_kv_heads 2",
        ),
        ("block", HIDDEN, {"target": {"head_dim": 7}}, "head_dim 7 is odd: RoPE rotates pairs"),
        (
            "block",
            HIDDEN,
            {"target": {"rope": {"rope_type": "dynamic", "rope_theta": 1e4}}},
            "rope_type 'dynamic' is not supported; choose from default, linear, llama3, yarn",
        ),
        (
            "block",
            HIDDEN,
            {"target": {"rope": {**TARGET["rope"], "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor must be 1.0: heads rotate whole head vectors",
        ),
        (
            "block",
            HIDDEN,
            {"target": {"rope": {"rope_type": "default"}}},
            "rope has no rope_theta",
        ),
    ],
)
def test_a_contradiction_is_said_in_one_sentence(form, context, fields, sentence) -> None:
    with pytest.raises(ValidationError) as error:
        tiny_config(form, context, **fields)
    assert [problem["msg"] for problem in error.value.errors()] == [f"Value error, {sentence}"]


def test_all_contradictions_are_said_at_once() -> None:
    with pytest.raises(ValidationError) as error:
        tiny_config("autoregressive", {"source": "hidden"}, mask="bidirectional")
    message = error.value.errors()[0]["msg"]
    assert message.removeprefix("Value error, ").split("; ") == [
        "context.source hidden needs context.target_layers",
        "mask bidirectional needs form block",
    ]


@pytest.mark.parametrize("context", [HIDDEN, SUM], ids=["hidden", "hybrid"])
def test_seeded_slots_spare_the_one_of_the_last_depth(context) -> None:
    assert tiny_config("block", context, block_size=6).num_slots == 6
    assert tiny_config("block", context, block_size=6, slots="seeded").num_slots == 5
    assert tiny_config("autoregressive", HIDDEN, block_size=6).num_slots == 6


def test_the_shape_of_a_packaged_target() -> None:
    config = CATALOGUE["smollm2-135m-instruct"].config
    shape = TargetShape.from_hf(config, name="smollm2", fingerprint="f")
    assert shape == TargetShape(
        name="smollm2",
        hidden_size=576,
        num_layers=30,
        vocab_size=49152,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope={"rope_type": "default", "rope_theta": 100000.0},
        qk_norm=False,
        fingerprint="f",
    )


HF = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_both_spellings_of_rope_mean_the_same() -> None:
    old = {**HF, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}
    new = {**HF, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    shapes = [TargetShape.from_hf(config, name="x") for config in (old, new)]
    assert shapes[0] == shapes[1]
    assert shapes[0].rope == new["rope_parameters"]
    assert shapes[0].qk_norm
    assert not TargetShape.from_hf({**HF, "model_type": "llama"}, name="x").qk_norm


def test_another_activation_is_refused() -> None:
    with pytest.raises(HeadError) as error:
        TargetShape.from_hf({**HF, "hidden_act": "gelu"}, name="x")
    assert str(error.value) == "x has hidden_act 'gelu': draft layers have silu only"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": None}, "the config of x has no rms_norm_eps"),
        ({"vocab_size": None}, "the config of x has no vocab_size"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            "x cannot have a head: rope_type 'dynamic' is not supported; "
            "choose from default, linear, llama3, yarn",
        ),
        (
            {"rms_norm_eps": 0.0},
            "x cannot have a head: rms_norm_eps: Input should be greater than 0",
        ),
    ],
)
def test_a_target_whose_layers_cannot_be_shared_is_refused(change, message: str) -> None:
    config = {key: value for key, value in {**HF, **change}.items() if value is not None}
    with pytest.raises(HeadError) as error:
        TargetShape.from_hf(config, name="x")
    assert str(error.value) == message
