"""The real model, converted: the tokenizer's traps, and whether it still speaks English.

Downloads it unless the cache has it. The un-permute of the query and key rows is the step that can
be wrong without any error, so its absence is measured too. Perplexities measured in float32, on the
text below: 16.4 right, 45.6 with neither un-permuted (attention still sees contents, not order),
more than 5,000 with only one of the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specstack.models.packaged import CATALOGUE, ensure

pytestmark = pytest.mark.network
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

NAME = "smollm2-135m-instruct"
TEXT = (
    "Water boils at one hundred degrees Celsius at sea level. When it is heated further, it turns "
    "into steam, which rises into the air, cools down and forms clouds. Later the drops fall back "
    "to the ground as rain, flow into rivers and return to the sea, where the cycle begins again."
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure(NAME)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def projections(model: Any) -> Iterator[dict[str, Any]]:
    """The query and key weights by name, to be changed in place; restored afterwards."""
    found = {
        name: weight
        for name, weight in model.state_dict().items()
        if name.endswith(("q_proj.weight", "k_proj.weight"))
    }
    before = {name: weight.clone() for name, weight in found.items()}
    yield found
    for name, weight in found.items():
        weight.copy_(before[name])


def perplexity(model: Any, tokenizer: Any) -> float:
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(ids, labels=ids).loss.exp())


def permute_again(weight: Any) -> None:
    """Put a projection back into llama.cpp's order, as if it had not been un-permuted."""
    heads = weight.shape[0] // CATALOGUE[NAME].config["head_dim"]
    weight.copy_(weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape))


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    ids = tokenizer("12345").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["1", "2", "3", "4", "5"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2024").input_ids)[-4:] == list("2024")


@pytest.mark.parametrize(
    "text", ["", "Hello, world!", "  two  spaces\n\ttab\r\n", "x = f(3.14)  # ✓", "naïve 日本語 🙂"]
)
def test_text_round_trips_and_gets_no_token_added(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_control_tokens_are_single_ids(tokenizer: Any) -> None:
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>"]
    assert [tokenizer(token).input_ids for token in controls] == [[0], [1], [2], [3], [16]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == CATALOGUE[NAME].config["vocab_size"]


def test_chat_template_adds_the_system_prompt_and_opens_the_answer(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_config_is_the_one_of_the_catalogue(folder: Path, model: Any) -> None:
    assert json.loads((folder / "config.json").read_text()) == CATALOGUE[NAME].config
    assert sum(p.numel() for p in model.parameters()) == CATALOGUE[NAME].parameters
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 100_000
    assert model.generation_config.eos_token_id == 2


def test_greedy_answer_is_sensible_and_ends(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_english_is_likely(model: Any, tokenizer: Any) -> None:
    assert perplexity(model, tokenizer) < 20


@pytest.mark.parametrize(
    ("forgotten", "at_least"),
    [(("q_proj", "k_proj"), 40), (("q_proj",), 1000), (("k_proj",), 1000)],
)
def test_without_the_unpermute_english_is_unlikely(
    model: Any,
    tokenizer: Any,
    projections: dict[str, Any],
    forgotten: tuple[str, ...],
    at_least: float,
) -> None:
    for name, weight in projections.items():
        if name.split(".")[-2] in forgotten:
            permute_again(weight)
    assert perplexity(model, tokenizer) > at_least
