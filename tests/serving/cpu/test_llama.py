"""A straightened Llama model computes SGLang's own bits; other models are left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PROBE = Path(__file__).with_name("straight_probe.py")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changes))


def probe(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter)  # their defaults, 0 and 1, would hide them
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    run = subprocess.run(
        [sys.executable, str(PROBE), str(folder)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_bias": True, "rope_parameters": LLAMA3_ROPE}],
    ids=["llama2", "bias-llama3"],
)
def test_the_straight_forward_gives_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    result = probe(llama(**changes), tmp_path)
    assert result["straight"]
    assert len(result["compared"]) == 3 * 1 + 3 * 4  # calls x (hidden, captured layers)
    assert result["different"] == []


def test_other_models_keep_their_own_forward(tmp_path: Path) -> None:
    result = probe(Qwen2ForCausalLM(Qwen2Config(**SIZES)), tmp_path)
    assert not result["straight"]
