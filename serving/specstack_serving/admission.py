"""What a single request may ask for: the opt-out, and features that speculation cannot honour.

Refusals are ValueErrors raised where SGLang validates requests; its HTTP layer answers 400 with
the text. Nothing is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specstack_serving.carrier import current_plan

REQUEST_KEY = "specstack"

_REFUSED_FIELDS = {
    "lora_path": "LoRA adapters",
    "custom_logit_processor": "custom logit processors",
    "max_thinking_tokens": "thinking budgets",
    "return_sampling_mask": "sampling masks",
    "return_hidden_states": "returned hidden states",
    "return_routed_experts": "returned expert routes",
    "return_indexer_topk": "returned indexer choices",
    "positional_embed_overrides": "embedding overrides",
    "input_embeds": "input embeddings (the drafter reads token ids)",
    "watermark": "watermarks",
}


def validate_request(original: Any, manager: Any, obj: Any, input_ids: Any) -> Any:
    """Hook around the engine's own validation of one request."""
    for name, feature in _REFUSED_FIELDS.items():
        value = getattr(obj, name, None)
        if value not in (None, False, "") and value != [None]:
            raise ValueError(_refusal(feature))
    params = obj.sampling_params if isinstance(obj.sampling_params, Mapping) else {}
    if (params.get("beam_width") or 1) > 1:
        raise ValueError(_refusal("beam search"))
    _check_rule(params)
    _check_stop_tokens(params)
    wants_speculation(params.get("custom_params"))
    return original(manager, obj, input_ids)


def wants_speculation(custom_params: Any) -> bool:
    """Read `{"specstack": {"speculate": false}}`.

    Raises:
        ValueError: the value under "specstack" has another shape.
    """
    if not isinstance(custom_params, Mapping) or REQUEST_KEY not in custom_params:
        return True
    options = custom_params[REQUEST_KEY]
    if not isinstance(options, Mapping) or set(options) - {"speculate"}:
        raise ValueError(f'"{REQUEST_KEY}" takes {{"speculate": true|false}}, found {options!r}')
    speculate = options.get("speculate", True)
    if not isinstance(speculate, bool):
        raise ValueError(f'"{REQUEST_KEY}.speculate" is true or false, found {speculate!r}')
    return speculate


def _check_rule(params: Mapping[str, Any]) -> None:
    plan = current_plan()
    assert plan is not None
    if plan.verify.kind != "greedy":
        return
    temperature = params.get("temperature")
    greedy = params.get("top_k") == 1 or (temperature is not None and temperature < 1e-6)
    if not greedy:
        raise ValueError(
            f"this server verifies greedily and cannot sample (temperature {temperature}): send "
            "temperature 0, or serve a pipeline with `verify: sample_and_walk`"
        )


def _check_stop_tokens(params: Mapping[str, Any]) -> None:
    """An id beyond the vocabulary would end the engine in its own min_new_tokens."""
    plan = current_plan()
    assert plan is not None
    stops = params.get("stop_token_ids") or ()
    if plan.target.facts is None or not isinstance(stops, (list, tuple, set)):
        return
    vocab = plan.target.facts.vocab_size
    wrong = [i for i in stops if isinstance(i, int) and not 0 <= i < vocab]
    if wrong:
        raise ValueError(f"stop_token_ids {wrong}: the vocabulary has {vocab} tokens")


def _refusal(feature: str) -> str:
    return (
        f"{feature}: not supported by a speculative pipeline; leave it out, or serve a pipeline "
        "with `drafter: none`"
    )


class RequestOptions:
    """ASGI middleware: moves a top-level "specstack" key to where the engine keeps it.

    OpenAI clients send `extra_body` at the top level, where the engine's request models drop
    unknown keys. Bodies without the word pass through untouched.
    """

    _PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] not in self._PATHS:
            await self._app(scope, receive, send)
            return
        messages, body = await _read_body(receive)
        if f'"{REQUEST_KEY}"'.encode() in body:
            body = move_request_options(body, native=scope["path"] == "/generate")
            scope = {**scope, "headers": _with_length(scope["headers"], len(body))}
            messages = [{"type": "http.request", "body": body, "more_body": False}]
        queue = iter(messages)

        async def replay() -> Any:
            return next(queue, None) or await receive()

        await self._app(scope, replay, send)


def move_request_options(body: bytes, *, native: bool) -> bytes:
    """Move the top-level "specstack" of a JSON body into its custom_params.

    Args:
        native: the body is of SGLang's own /generate, where custom_params belong to
            sampling_params. What is not a JSON object passes unchanged: the engine refuses it.
    """
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if not isinstance(request, dict) or REQUEST_KEY not in request:
        return body
    options = request.pop(REQUEST_KEY)
    holder = request
    if native:
        holder = request["sampling_params"] = request.get("sampling_params") or {}
        if not isinstance(holder, dict):
            return body
    holder["custom_params"] = {**(holder.get("custom_params") or {}), REQUEST_KEY: options}
    return json.dumps(request).encode()


async def _read_body(receive: Any) -> tuple[list[Any], bytes]:
    messages: list[Any] = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body"):
            return messages, b"".join(m.get("body", b"") for m in messages)


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(k, v) for k, v in headers if k.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
