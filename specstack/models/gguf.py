"""GGUF to a Hugging Face folder: `config.json`, float32 safetensors, tokenizer, chat template.

Converts what the catalogue needs and refuses everything else: Llama architecture, byte-level BPE
with the "smollm" pre-tokenizer. Quantised weights are dequantised; their rounding stays. Tensors
are converted and written one at a time, so the peak memory is that of the largest one.
Needs numpy and gguf; no torch. Nothing here knows about caches or downloads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray

Fields = dict[str, Any]
Array = NDArray[np.float32]

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_PARTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Tensor(NamedTuple):
    """One tensor of the output; `load` is called once, when it is written."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Array]


def convert(source: Path, folder: Path, *, on_tensor: Callable[[int, int], None]) -> dict[str, Any]:
    """Write the files of a Hugging Face model into the existing `folder`; return its config.

    Args:
        on_tensor: called with (tensors written, tensors in all), first with 0.

    Raises:
        ValueError: the file holds something that this converter does not translate.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _require_supported(fields)
    tensors = [_translate(tensor, fields) for tensor in reader.tensors]
    config = llama_config(fields, tied=all(t.name != "lm_head.weight" for t in tensors))
    write_safetensors(folder / "model.safetensors", tensors, on_tensor=on_tensor)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(fields))
    _write_json(folder / "tokenizer.json", tokenizer(fields))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    template = folder / "chat_template.jinja"
    template.write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    return config


def _require_supported(fields: Fields) -> None:
    for key, supported in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if fields.get(key) != supported:
            raise ValueError(f"{key} is {fields.get(key)!r}, only {supported!r} is converted")


def llama_config(fields: Fields, *, tied: bool) -> dict[str, Any]:
    """Return `config.json`; `tied` says that the output layer is the embedding."""
    hidden_size = fields["llama.embedding_length"]
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden_size // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "dtype": "float32",
        **generation_config(fields),
    }


def generation_config(fields: Fields) -> dict[str, Any]:
    """Return the special ids of generation; a model without a padding token pads with its end."""
    end = fields["tokenizer.ggml.eos_token_id"]
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": end,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", end),
    }


def _shortest(value: float) -> float:
    """The decimal that a float32 field was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tokenizer(fields: Fields) -> dict[str, Any]:
    """Return `tokenizer.json`: byte-level BPE after a split into single digits.

    The split is what the name "smollm" stands for; GGUF does not spell it out, and without it
    "12345" becomes tokens that the model has never seen.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **token} for i, token in _control_tokens(fields).items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """Return `tokenizer_config.json`.

    The class is named outright: the one that goes with a Llama model would replace the split.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    ids = generation_config(fields)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "added_tokens_decoder": {str(i): t for i, t in _control_tokens(fields).items()},
    }


def _control_tokens(fields: Fields) -> dict[int, dict[str, Any]]:
    kinds = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        i: {"content": token, **flags, "special": True}
        for i, (token, kind) in enumerate(kinds)
        if kind == TokenType.CONTROL
    }


def _translate(tensor: Any, fields: Fields) -> Tensor:
    name, heads = tensor_name(tensor.name), 0
    if name.endswith("q_proj.weight"):
        heads = fields["llama.attention.head_count"]
    elif name.endswith("k_proj.weight"):
        heads = fields["llama.attention.head_count_kv"]

    def load() -> Array:
        weight = dequantize(tensor.data, tensor.tensor_type)
        return unpermute_rope(weight, heads) if heads else weight

    return Tensor(name, tuple(int(size) for size in reversed(tensor.shape)), load)


def tensor_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor, "blk.7.attn_q.weight" for instance."""
    if name in _MODEL_PARTS:
        return _MODEL_PARTS[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, suffix = rest.partition(".")
    if not name.startswith("blk.") or part not in _LAYER_PARTS or suffix != "weight":
        raise ValueError(f"tensor {name!r} has no place in a Llama model without biases")
    return f"model.layers.{block}.{_LAYER_PARTS[part]}.weight"


def unpermute_rope(weight: Array, heads: int) -> Array:
    """Undo llama.cpp's order of the rows of a query or key projection.

    llama.cpp rotates neighbours (2j, 2j + 1) of a head, Hugging Face rotates (j, j + half): within
    every head, row 2j + s of `weight` becomes row s * half + j.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_safetensors(
    path: Path, tensors: Iterable[Tensor], *, on_tensor: Callable[[int, int], None]
) -> None:
    """Write float32 tensors one after the other in the safetensors format.

    The format is a length (8 bytes, little-endian), a JSON header, the raw data. The library's own
    writer takes all tensors at once, twice the model in memory.
    """
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, _ in tensors:
        end = offset + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, (name, shape, load) in enumerate(tensors):
            on_tensor(done, len(tensors))
            data = np.ascontiguousarray(load(), dtype="<f4")
            assert data.shape == shape, f"{name}: {data.shape} instead of {shape}"
            file.write(data.data)
        on_tensor(len(tensors), len(tensors))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    indent = None if path.name == "tokenizer.json" else 2
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")
