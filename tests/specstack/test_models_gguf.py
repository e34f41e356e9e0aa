"""The converter on a tiny Llama: weights, names, tokenizer, and what it refuses. No network.

Expected weights come from `specstack.models.testing`, which orders rows one at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from specstack.models import gguf, testing

Converted = tuple[Path, dict[str, Any], dict[str, testing.Array], list[tuple[int, int]]]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("converted")
    source = tmp_path_factory.mktemp("source") / "tiny.gguf"
    expected = testing.write_gguf(source)
    steps: list[tuple[int, int]] = []
    config = gguf.convert(source, folder, on_tensor=lambda *step: steps.append(step))
    return folder, config, expected, steps


def test_every_tensor_is_exact_in_hugging_face_order(converted: Converted) -> None:
    from safetensors.numpy import load_file

    folder, _, expected, _ = converted
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert weights[name].dtype == np.float32
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)


def test_the_header_says_pytorch_and_the_file_is_as_long_as_it_says(converted: Converted) -> None:
    path = converted[0] / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    assert len(content) == 8 + length + max(t["data_offsets"][1] for t in header.values())


def test_progress_counts_every_tensor_once(converted: Converted) -> None:
    total = len(converted[2])
    assert converted[3] == [(done, total) for done in range(total + 1)]


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (1, 8), (3, 2), (3, 6), (9, 64)])
def test_unpermute_undoes_the_slow_permutation(heads: int, head_dim: int) -> None:
    weight = np.random.default_rng(0).standard_normal((heads * head_dim, 5)).astype(np.float32)
    stored = testing.permuted(weight, heads)
    np.testing.assert_array_equal(gguf.unpermute_rope(stored, heads), weight)
    assert head_dim == 2 or not np.array_equal(stored, weight)


def test_rotating_halves_after_unpermute_equals_rotating_neighbours_before() -> None:
    """The reason for the order: both ways of writing RoPE must give the same attention scores."""
    heads, head_dim, half = 3, 8, 4
    stored = np.random.default_rng(1).standard_normal((heads * head_dim, 16)).astype(np.float32)
    x = np.random.default_rng(2).standard_normal((2, 16)).astype(np.float32)
    angles = np.array([[5.0], [2.0]]) * 100.0 ** -(np.arange(half) / half)  # positions 5 and 2
    spin = np.exp(1j * angles)[:, None, :]

    before = (x @ stored.T).reshape(2, heads, half, 2)
    neighbours = (before[..., 0] + 1j * before[..., 1]) * spin
    after = (x @ gguf.unpermute_rope(stored, heads).T).reshape(2, heads, 2, half)
    halves = (after[:, :, 0] + 1j * after[:, :, 1]) * spin

    score = np.einsum("hd,hd->h", neighbours[0], neighbours[1].conj()).real
    np.testing.assert_allclose(
        np.einsum("hd,hd->h", halves[0], halves[1].conj()).real, score, rtol=1e-5
    )
    unfixed = (x @ stored.T).reshape(2, heads, 2, half)
    wrong = (unfixed[:, :, 0] + 1j * unfixed[:, :, 1]) * spin
    assert not np.allclose(np.einsum("hd,hd->h", wrong[0], wrong[1].conj()).real, score, rtol=0.01)


def test_config_and_generation_config_come_from_the_file(converted: Converted) -> None:
    folder, config, _, _ = converted
    assert config == testing.CONFIG
    assert json.loads((folder / "config.json").read_text()) == config
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert json.loads((folder / "generation_config.json").read_text()) == ids
    assert (folder / "chat_template.jinja").read_text() == testing.TEMPLATE


def test_digits_are_split_before_merges_and_text_round_trips(converted: Converted) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["1", "2"], "the merge 1+2 must never apply"
    assert tokenizer.encode("hello").tokens == ["hell", "o"]
    assert tokenizer.encode("<|im_start|>hi<|im_end|>").ids[0] == 1
    for text in ("", "hello 12", " two  spaces\n\ttab", "naïve ✓ 日本語 \U0001f642", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_config_names_a_class_that_keeps_the_split(converted: Converted) -> None:
    config = json.loads((converted[0] / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == config["pad_token"] == "<|im_end|>"
    assert config["unk_token"] == "<|endoftext|>"
    assert config["model_max_length"] == testing.CONTEXT
    assert {t["content"] for t in config["added_tokens_decoder"].values()} == set(testing.CONTROL)


@pytest.mark.parametrize(
    ("architecture", "pre", "message"),
    [
        ("qwen2", "smollm", "general.architecture is 'qwen2', only 'llama' is converted"),
        ("llama", "llama-bpe", "tokenizer.ggml.pre is 'llama-bpe', only 'smollm' is converted"),
    ],
)
def test_another_kind_of_model_is_refused(
    tmp_path: Path, architecture: str, pre: str, message: str
) -> None:
    testing.write_gguf(tmp_path / "other.gguf", architecture=architecture, pre=pre)
    with pytest.raises(ValueError, match=message):
        gguf.convert(tmp_path / "other.gguf", tmp_path, on_tensor=lambda done, total: None)
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.0.ssm_a.weight", "rope_freqs.weight", "head.0.attn_q.weight"]
)
def test_a_tensor_without_a_place_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="has no place in a Llama model"):
        gguf.tensor_name(name)


def test_an_untied_output_layer_is_kept() -> None:
    assert gguf.tensor_name("output.weight") == "lm_head.weight"
    assert gguf.tensor_name("blk.17.ffn_down.weight") == "model.layers.17.mlp.down_proj.weight"
