"""Requests whose answers must not depend on speculation, one per feature of the API."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from specstack.prompts import read_prompts

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"

REPEAT = "Repeat this list five times, then stop: red, green, blue, yellow, red, green, blue."
CODE = "Write a Python class Stack with push, pop, peek and is_empty, then show how to use it."
STORY = "Tell me a short story about a lighthouse keeper and a storm."

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
    }
)

GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_new_tokens_1": {"max_new_tokens": 1},
    "max_new_tokens_odd": {"max_new_tokens": 7},
    "stop_string": {"stop": ["blue, yellow", "def pop"]},
    "stop_token": {"stop_token_ids": [28, 32]},
    "min_new_tokens": {"min_new_tokens": 40, "stop_token_ids": [28]},
    "ignore_eos": {"ignore_eos": True, "max_new_tokens": 64},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "presence_penalty": {"presence_penalty": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.2},
    # Without the scaling one: the engine's order of the two kinds differs from process to process.
    "additive_penalties": {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "min_new_tokens": 8,
    },
    "logit_bias": {"logit_bias": {"28": -100.0, "30": 5.0}},
    "json_schema": {"json_schema": SCHEMA, "max_new_tokens": 64},
    "regex": {"regex": r"(red|green|blue)(, (red|green|blue)){3,8}\.", "max_new_tokens": 64},
}
"""Sampling parameters beyond temperature 0, by case."""


def chat(text: str) -> str:
    """The packaged model's own template, without its tokenizer."""
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        f"Face<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def body(text: str, params: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """A /generate request, greedy unless `params` says otherwise."""
    sampling = {"temperature": 0.0, "max_new_tokens": 48, **params}
    return {"text": chat(text), "sampling_params": sampling, **extra}


def answers(url: str) -> dict[str, Any]:
    """Run every greedy case, alone and with log-probabilities where they matter."""
    found: dict[str, Any] = {}
    for name, params in GREEDY.items():
        for text in (REPEAT, CODE):
            request = body(text, params, return_logprob=True, top_logprobs_num=3)
            response = httpx.post(f"{url}/generate", json=request, timeout=120.0)
            assert response.status_code == 200, (name, response.text)
            found[f"{name}/{text[:6]}"] = response.json()
    return found


def continuations(url: str, *, concurrency: int, max_tokens: int = 40) -> list[list[int]]:
    """Greedy token ids of every prompt of the fixture set, `concurrency` in flight."""

    def one(text: str) -> list[int]:
        request = body(text, {"max_new_tokens": max_tokens})
        response = httpx.post(f"{url}/generate", json=request, timeout=300.0)
        response.raise_for_status()
        ids: list[int] = response.json()["output_ids"]
        return ids

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, [p.text for p in read_prompts(PROMPTS)]))
