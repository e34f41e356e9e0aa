"""A random Llama of a few thousand weights with its own greedy answers: for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specstack.training.answers import Answer, to_line

VOCABULARY, HIDDEN, LAYERS = 128, 64, 4
CONTEXTS: dict[str, dict[str, Any]] = {
    "hidden": {"source": "hidden", "target_layers": [1, 3]},
    "kv": {"source": "kv", "kv_layers": [3], "kv_mix": "paired"},
    "kv_linear": {"source": "kv", "kv_layers": [1, 3], "kv_mix": "linear"},
    "sum": {
        "source": "hybrid",
        "target_layers": [1, 3],
        "kv_layers": [3],
        "kv_mix": "paired",
        "fusion": "sum",
    },
    "gated": {
        "source": "hybrid",
        "target_layers": [1, 3],
        "kv_layers": [3],
        "kv_mix": "paired",
        "fusion": "gated_delta",
    },
}


def save_target(folder: Path, seed: int = 0) -> Path:
    """Write the model as a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    untyped: Any = AutoModelForCausalLM
    untyped.from_config(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def save_answers(
    path: Path, target: Path, num_answers: int = 8, num_prompt: int = 6, num_output: int = 20
) -> Path:
    """Write its greedy answers to random prompts of growing length."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    random = torch.Generator().manual_seed(1)
    with path.open("wb") as file:
        for line in range(1, num_answers + 1):
            prompt = torch.randint(3, VOCABULARY, (num_prompt + line % 3,), generator=random)
            tokens = prompt[None]
            for _ in range(num_output):
                best = model(tokens).logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, best], dim=1)
            file.write(to_line(_answer(line, prompt.tolist(), tokens[0, len(prompt) :].tolist())))
    return path


def _answer(line: int, prompt: list[int], output: list[int]) -> Answer:
    return Answer(
        line=line,
        id=str(line),
        prompt_sha256=f"{line:064x}",
        messages=({"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}),
        finish_reason="length",
        prompt_tokens=len(prompt),
        completion_tokens=len(output),
        input_ids=tuple(prompt),
        output_ids=tuple(output),
    )


def run_text(target: Path, file: Path, head: dict[str, Any], /, **sections: Any) -> str:
    """A run as YAML (JSON is YAML)."""
    import json

    run: dict[str, Any] = {
        "version": 1,
        "target": {"model": str(target)},
        "answers": {"files": [str(file)], "holdout_share": 0.0},
        "head": head,
        "optimiser": {"batch_size": 4, "lr": 3e-3},
        "device": "cpu",
    }
    for name, values in sections.items():
        run[name] = {**run.get(name, {}), **values} if isinstance(values, dict) else values
    return json.dumps(run)
