"""From a plan to the engine's own command line."""

from __future__ import annotations

import json
from typing import Any

from specstack.plan import Plan, sglang_args

SPELT_OTHERWISE = {
    "ep_join_mode": "elastic_ep_join_mode",
    "ep_join_rank_offset": "elastic_ep_join_rank_offset",
    "fp4_gemm_runner_backend": "fp4_gemm_backend",
    "fp8_gemm_runner_backend": "fp8_gemm_backend",
}
"""Arguments whose flag is not their name."""
SWITCHES = frozenset({
    "dcp_replicate_q_proj", "dllm_fdfo", "enable_decoder_swa_bounded_replay",
    "enable_dsa_fused_indexer", "enable_fused_qk_norm_rope", "enable_tf32_matmul",
    "enable_tp_lm_head_all_to_all", "experts_shared_outer_loras", "lora_strict_loading",
    "mm_enable_dp_encoder", "ple_offload_embedding", "speculative_enable_w4a4_mxfp4_megamoe",
})  # fmt: skip
"""Arguments with a `--no-` form: leaving them out may mean something else than false."""


def server_argv(plan: Plan) -> list[str]:
    """The plan as SGLang flags.

    `--name=value`, `--name item item` for lists, `--name` for true, nothing for None and false.
    Mappings are passed as JSON.
    """
    argv: list[str] = []
    for name, value in sglang_args(plan).items():
        argv += _flag(name, value)
    return argv


def _flag(name: str, value: Any) -> list[str]:
    flag = SPELT_OTHERWISE.get(name, name).replace("_", "-")
    if value is None or value is False:
        return [f"--no-{flag}"] if value is False and name in SWITCHES else []
    if value is True:
        return [f"--{flag}"]
    if isinstance(value, (list, tuple)):
        return [f"--{flag}", *map(_text, value)]
    return [f"--{flag}={_text(value)}"]  # one word: a value may begin with a dash


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else str(value)
