"""SGLang arguments that `engine.args` may not set, with the reason and what to do instead."""

from __future__ import annotations

from typing import Any, NamedTuple

OWNED: dict[str, str] = {
    "model_path": "target.model",
    "dtype": "target.dtype",
    "device": "engine.device",
    "tp_size": "engine.tp",
    "attention_backend": "engine.attention_backend",
    "page_size": "engine.page_size",
    "max_running_requests": "engine.max_running_requests",
    "max_total_tokens": "engine.max_total_tokens",
    "context_length": "engine.context_length",
    "host": "engine.host",
    "port": "engine.port",
}
"""Arguments with a home in the language."""

ALWAYS_SET: dict[str, str] = {
    "enable_metrics": "specstack always serves metrics",
    "stat_loggers": "specstack installs its own",
}
"""Arguments that specstack sets to one value."""

SPECULATION_PREFIXES = ("speculative_", "decoupled_spec_", "uno_", "spec_trace_")
"""Arguments of SGLang's own speculative decoding."""


class Refusal(NamedTuple):
    """Why drafting excludes a feature, and the way out."""

    feature: str
    reason: str
    instead: str


_UNTESTED = "it has not been tested with a drafter"
REFUSED_WITH_DRAFTS: dict[str, Refusal] = {
    "pp_size": Refusal(
        "pipeline parallelism", "SGLang refuses plug-in drafting with it", "use engine.tp"
    ),
    "enable_dp_attention": Refusal(
        "attention data parallelism", "ranks could choose different budgets", "use engine.tp"
    ),
    "attn_dp_size": Refusal(
        "attention data parallelism", "ranks could choose different budgets", "use engine.tp"
    ),
    "attn_cp_size": Refusal("context parallelism", _UNTESTED, "use engine.tp"),
    "dcp_size": Refusal("context parallelism", _UNTESTED, "use engine.tp"),
    "enable_lora": Refusal(
        "LoRA", "SGLang allows adapters with its own algorithms only", "merge the adapter"
    ),
    "lora_paths": Refusal(
        "LoRA", "SGLang allows adapters with its own algorithms only", "merge the adapter"
    ),
    "disaggregation_mode": Refusal(
        "prefill-decode disaggregation", "drafter state is not transferred", "serve both in one"
    ),
    "enable_mixed_chunk": Refusal(
        "mixed chunked prefill", "prefill and verify tokens do not share a step", "leave it out"
    ),
    "enable_two_batch_overlap": Refusal("two-batch overlap", _UNTESTED, "leave it out"),
    "enable_pdmux": Refusal("prefill-decode multiplexing", _UNTESTED, "leave it out"),
    "enable_unified_memory": Refusal(
        "unified memory", "SGLang refuses plug-in drafting with it", "leave it out"
    ),
    "enable_hierarchical_cache": Refusal("the hierarchical cache", _UNTESTED, "leave it out"),
    "enable_lmcache": Refusal("LMCache", "SGLang refuses it with any drafting", "leave it out"),
    "use_ray": Refusal("Ray", "its actors load no SGLang plug-ins", "start without it"),
    "dllm_algorithm": Refusal(
        "diffusion decoding", "its step is not a target forward", "leave it out"
    ),
    "is_embedding": Refusal("embedding models", "they decode no tokens", "leave it out"),
    "enable_nvidia_megakernel": Refusal(
        "megakernels", "they replace the verify step", "leave it out"
    ),
    "enable_amd_monokernel": Refusal("monokernels", "they replace the verify step", "leave it out"),
    "decode_attention_backend": Refusal(
        "an attention backend per phase",
        "drafts are verified by one backend",
        "set engine.attention_backend",
    ),
    "prefill_attention_backend": Refusal(
        "an attention backend per phase",
        "drafts are verified by one backend",
        "set engine.attention_backend",
    ),
}
"""Arguments that turn on what drafting cannot be combined with."""

PER_REQUEST_LIMITS: dict[str, str] = {
    "beam search": "SGLang refuses beam requests with any drafting",
}
"""Features of single requests, shown by `explain`."""


def turns_on(name: str, value: Any) -> bool:
    """Whether `value` enables the feature behind an argument (sizes: more than one)."""
    if name.endswith("_size"):
        return not (value is None or value == 1)
    return value not in (None, False, "null", [], {})
