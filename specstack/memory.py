"""What a plan needs in memory, in bytes; None where the model's facts do not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specstack.facts import DTYPE_BYTES
from specstack.head_sizes import head_parameters, kv_values_per_token
from specstack.models.heads.config import HeadConfig
from specstack.resolve import Steps

if TYPE_CHECKING:
    from specstack.plan import Plan

LOGIT_BYTES = 4
"""Verification reads logits in float32."""
_KV_CACHE_DTYPES = {"auto": None, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2}


def weights_bytes(plan: Plan) -> int | None:
    """Weights of the target, all ranks together; None for quantised or uncounted models."""
    facts = plan.target.facts
    if facts is None or facts.num_parameters is None or facts.quantization:
        return None
    if plan.target.dtype not in DTYPE_BYTES or "quantization" in plan.engine.args:
        return None
    return facts.num_parameters * DTYPE_BYTES[plan.target.dtype]


def kv_bytes_per_token(plan: Plan) -> int | None:
    """Keys and values of one token in all layers, all ranks together."""
    facts, dtype = plan.target.facts, plan.target.dtype
    cache_dtype = plan.engine.args.get("kv_cache_dtype", "auto")
    if facts is None or facts.is_mla or facts.is_recurrent or dtype not in DTYPE_BYTES:
        return None
    if cache_dtype not in _KV_CACHE_DTYPES:
        return None
    per_value = _KV_CACHE_DTYPES[cache_dtype] or DTYPE_BYTES[dtype]
    return facts.kv_bytes_per_token(dtype) // DTYPE_BYTES[dtype] * per_value


def kv_pool_bytes(plan: Plan) -> int | None:
    """The KV cache, where its size is decided here."""
    per_token, tokens = kv_bytes_per_token(plan), plan.engine.max_total_tokens
    return None if per_token is None or tokens is None else per_token * tokens


def draft_weights_bytes(plan: Plan) -> int | None:
    """Weights of all heads."""
    return _draft_bytes(plan, head_parameters)


def draft_kv_bytes_per_token(plan: Plan) -> int | None:
    """What all heads keep per slot of the KV cache."""
    return _draft_bytes(plan, kv_values_per_token)


def draft_kv_pool_bytes(plan: Plan) -> int | None:
    """What all heads keep, where the KV cache's size is decided here."""
    per_token, tokens = draft_kv_bytes_per_token(plan), plan.engine.max_total_tokens
    return None if per_token is None or tokens is None else per_token * tokens


def _draft_bytes(plan: Plan, count: Callable[[HeadConfig], int]) -> int | None:
    if plan.target.dtype not in DTYPE_BYTES:
        return None
    configs = [head.config for head in plan.heads if head.config is not None]
    if len(configs) < len(plan.heads):
        return None
    return sum(map(count, configs)) * DTYPE_BYTES[plan.target.dtype]


def peak_verify_tokens(plan: Plan, steps: Steps) -> int | None:
    """Most nodes that one verify step can hold; None where the batch has no bound."""
    most = plan.engine.max_running_requests
    peaks = []
    for batch, budget in steps:
        bounds = [bound for bound in (batch, most) if bound is not None]
        if not bounds:
            return None
        peaks.append(min(bounds) * (budget + 1))
    return max([*peaks, *([most] if most else [])])


def tree_logits_bytes(plan: Plan, steps: Steps) -> int | None:
    """Logits of the largest verify step."""
    tokens, facts = peak_verify_tokens(plan, steps), plan.target.facts
    return None if tokens is None or facts is None else tokens * facts.vocab_size * LOGIT_BYTES
