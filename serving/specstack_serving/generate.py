"""A client of SGLang's /generate: token ids in, token ids out, many in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True)
class Prompt:
    """One prompt of a JSONL file."""

    id: str
    text: str


@dataclass(frozen=True)
class Generation:
    """What a server answered to one prompt."""

    output_ids: tuple[int, ...]
    meta: dict[str, Any]


def read_prompts(path: Path, num: int | None = None) -> list[Prompt]:
    """Read lines with `id` and `turns` (the first one is used) or `prompt`.

    Raises:
        ValueError: a line is not such an object; names the line.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if num is not None and len(prompts) == num:
            break
        try:
            record = json.loads(line)
            text = record["turns"][0] if "turns" in record else record["prompt"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: expected an object with `turns` or `prompt`: {error!r}"
            ) from None
        prompts.append(Prompt(str(record.get("id", number)), text))
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def chat_ids(model_folder: str, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Render each prompt as a single user turn and tokenise it with the model's template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.text}], tokenize=False, add_generation_prompt=True
        )
        for p in prompts
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]


def generate(
    url: str,
    inputs: Sequence[Sequence[int]],
    sampling_params: dict[str, Any],
    *,
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
    **request: Any,
) -> list[Generation]:
    """Send every input, `concurrency` at a time; answers in the order of the inputs.

    Raises:
        httpx.HTTPStatusError: the server refused one.
    """
    return asyncio.run(_generate(url, inputs, sampling_params, concurrency, on_done, request))


async def _generate(
    url: str,
    inputs: Sequence[Sequence[int]],
    sampling_params: dict[str, Any],
    concurrency: int,
    on_done: Callable[[], None],
    request: dict[str, Any],
) -> list[Generation]:
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:

        async def one(ids: Sequence[int]) -> Generation:
            body = {"input_ids": list(ids), "sampling_params": sampling_params, **request}
            async with gate:
                response = await client.post("/generate", json=body)
            response.raise_for_status()
            answer = response.json()
            on_done()
            return Generation(tuple(answer["output_ids"]), answer["meta_info"])

        return list(await asyncio.gather(*(one(ids) for ids in inputs)))
