"""A client of SGLang's /generate: token ids in, token ids out, many in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from specstack.prompts import Prompt


@dataclass(frozen=True)
class Generation:
    """What a server answered to one prompt."""

    output_ids: tuple[int, ...]
    meta: dict[str, Any]


class RequestRefused(RuntimeError):
    """A request was answered with an error; the text is the code and the server's words."""


def chat_ids(model_folder: str, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Render each prompt and tokenise it with the model's template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rendered = [
        tokenizer.apply_chat_template(
            [m.as_data() for m in p.messages], tokenize=False, add_generation_prompt=True
        )
        for p in prompts
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]


def generate(
    url: str,
    inputs: Sequence[Sequence[int]],
    sampling_params: dict[str, Any] | Sequence[dict[str, Any]],
    *,
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
    **request: Any,
) -> list[Generation]:
    """Send every input, `concurrency` at a time; answers in the order of the inputs.

    Args:
        sampling_params: of all inputs, or one for each.

    Raises:
        RequestRefused: the server refused one; the others are given up.
        httpx.TransportError: the server is gone.
    """
    each = [sampling_params] * len(inputs) if isinstance(sampling_params, dict) else sampling_params
    return asyncio.run(_generate(url, inputs, each, concurrency, on_done, request))


async def _generate(
    url: str,
    inputs: Sequence[Sequence[int]],
    sampling_params: Sequence[dict[str, Any]],
    concurrency: int,
    on_done: Callable[[], None],
    request: dict[str, Any],
) -> list[Generation]:
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)  # httpx's own limit is 100
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=limits, trust_env=False
    ) as client:

        async def one(ids: Sequence[int], params: dict[str, Any]) -> Generation:
            body = {"input_ids": list(ids), "sampling_params": params, **request}
            async with gate:
                response = await client.post("/generate", json=body)
            if response.is_error:
                raise RequestRefused(f"{response.status_code}: {response.text.strip()}")
            answer = response.json()
            on_done()
            return Generation(tuple(answer["output_ids"]), answer["meta_info"])

        pairs = zip(inputs, sampling_params, strict=True)
        return list(await asyncio.gather(*(one(ids, params) for ids, params in pairs)))
