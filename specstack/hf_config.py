"""Reads a Hugging Face `config.json`: one name per fact, whatever the architecture calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
}
_POSITIONS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_RECURRENT_WORDS = ("mamba", "rwkv", "recurrent", "linear", "conv", "ssm")
_RECURRENT_KEYS = (
    "mamba_d_state",
    "ssm_cfg",
    "ssm_state_size",
    "linear_attn_config",
    "linear_num_key_heads",
    "conv_L_cache",
    "hybrid_override_pattern",
)


def read_config(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelFacts`; raises KeyError naming what is missing."""
    nested = config.get("text_config") or config.get("llm_config")
    text: Config = nested if isinstance(nested, Mapping) else config
    facts: dict[str, Any] = {name: int(_first(text, keys)) for name, keys in _NAMES.items()}
    heads = facts["num_heads"]
    kv_heads = _first(text, _KV_HEADS, heads)
    quantization = config.get("quantization_config") or {}
    facts |= {
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "num_kv_heads": int(kv_heads or heads),
        "head_dim": int(text.get("head_dim") or facts["hidden_size"] // heads),
        "max_position_embeddings": _first(text, _POSITIONS, None),
        "tie_word_embeddings": bool(
            text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        ),
        "dtype": _dtype(text) or _dtype(config) or "float32",
        "is_mla": text.get("kv_lora_rank") is not None,
        "is_recurrent": _is_recurrent(text),
        "sliding_window": _sliding_window(text),
        "quantization": quantization.get("quant_method"),
    }
    return {**facts, "num_parameters": _count_parameters(text, facts)}


_REQUIRED = object()


def _first(config: Config, keys: tuple[str, ...], default: Any = _REQUIRED) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    if default is _REQUIRED:
        raise KeyError(keys[0])
    return default


def _dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def _is_recurrent(text: Config) -> bool:
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if kinds:
        return any(word in str(kind) for kind in kinds for word in _RECURRENT_WORDS)
    if 0 in (text.get("attn_type_list") or []):
        return True
    name = str(text.get("model_type", ""))
    return any(word in name for word in _RECURRENT_WORDS) or any(
        text.get(key) is not None for key in _RECURRENT_KEYS
    )


def _sliding_window(text: Config) -> int | None:
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    if window is None or text.get("use_sliding_window") is False:
        return None
    if kinds and not any("sliding" in str(kind) for kind in kinds):
        return None
    return int(window)


def _count_parameters(text: Config, facts: Mapping[str, Any]) -> int | None:
    """Weights of a dense decoder with gated MLPs; norms and biases are left out."""
    inner = text.get("intermediate_size")
    if inner is None or facts["is_mla"] or facts["is_recurrent"]:
        return None
    if any(text.get(key) for key in _EXPERTS):
        return None
    hidden, head_dim = facts["hidden_size"], facts["head_dim"]
    attention = 2 * hidden * head_dim * (facts["num_heads"] + facts["num_kv_heads"])
    tables = 1 if facts["tie_word_embeddings"] else 2
    layers: int = facts["num_layers"] * (attention + 3 * hidden * int(inner))
    return layers + tables * int(facts["vocab_size"]) * int(hidden)
