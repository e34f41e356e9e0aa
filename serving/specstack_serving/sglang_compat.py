"""Every name of SGLang that specstack touches, in one table: the seam.

Other modules of this package write `from specstack_serving import sglang_compat as sgl` and use
`sgl.ForwardMode`; the import happens at first use, because platform plug-ins load in the middle
of SGLang's own start. `contract` checks the table against a source tree without importing
it: names, parameters, members. The version is pinned; a changed surface fails there, by name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

SGLANG_VERSION = "0.5.23"


@dataclass(frozen=True)
class Seam:
    """One name of SGLang: where it lives and what of it specstack relies on."""

    path: str
    """"package.module:Qualified.name"."""
    parameters: tuple[str, ...] = ()
    """Parameters that we pass or override by name (functions, methods, constructors)."""
    members: tuple[str, ...] = ()
    """Class members (methods, fields, enum values) that we call, set or override."""


SEAMS: dict[str, Seam] = {
    # -- CPU platform (cpu/) --------------------------------------------------------------
    "CpuDeviceMixin": Seam("sglang.srt.platforms.cpu:CpuDeviceMixin"),
    "SRTPlatform": Seam(
        "sglang.srt.platforms.interface:SRTPlatform",
        members=(
            "get_default_attention_backend",
            "get_kv_pool_cls",
            "get_speculative_cache_locs_fn",
            "supports_speculative_algorithm",
            "post_load_model",
        ),
    ),
    "PlatformCapabilities": Seam("sglang.srt.platforms.interface:PlatformCapabilities"),
    "PlatformEnum": Seam("sglang.srt.platforms.device_mixin:PlatformEnum", members=("OOT",)),
    "MHATokenToKVPool": Seam(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
        members=("_init_kv_copy_and_warmup", "_move_kv_cache_impl", "_store_kv_layer"),
    ),
    "KVWriteLoc": Seam("sglang.srt.mem_cache.memory_pool:KVWriteLoc"),
    "get_last_loc": Seam(
        "sglang.srt.mem_cache.allocation:get_last_loc",
        parameters=("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    ),
    "assign_req_to_token_pool_func": Seam(
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        parameters=(
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
    ),
    "AttentionBackend": Seam(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
        members=(
            "init_forward_metadata",
            "forward_decode",
            "forward_extend",
            "get_cuda_graph_seq_len_fill_value",
            "support_triton",
        ),
    ),
    "AttentionType": Seam("sglang.srt.layers.radix_attention:AttentionType", members=("DECODER",)),
    "RadixAttention": Seam("sglang.srt.layers.radix_attention:RadixAttention"),
    "register_attention_backend": Seam(
        "sglang.srt.layers.attention.attention_registry:register_attention_backend",
        parameters=("name",),
    ),
    "add_attention_backend_choices": Seam(
        "sglang.srt.arg_groups.choices:add_attention_backend_choices"
    ),
    "BaseFusedOp": Seam("sglang.kernels.fused_op:BaseFusedOp", members=("register_oot_forward",)),
    "RMSNorm": Seam("sglang.srt.layers.layernorm:RMSNorm", members=("forward_native",)),
    "RotaryEmbedding": Seam(
        "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding",
        members=("forward_native", "_compute_cos_sin_cache"),
    ),
    "apply_rotary_emb": Seam("sglang.srt.layers.rotary_embedding.utils:apply_rotary_emb"),
    "Llama3RotaryEmbedding": Seam(
        "sglang.srt.layers.rotary_embedding.rope_variant:Llama3RotaryEmbedding"
    ),
    "LinearBase": Seam("sglang.srt.layers.linear:LinearBase"),
    "LlamaModel": Seam(
        "sglang.srt.models.llama:LlamaModel",
        members=("forward", "embed_tokens", "layers", "norm", "layers_to_capture"),
    ),
    "LlamaDecoderLayer": Seam(
        "sglang.srt.models.llama:LlamaDecoderLayer",
        members=("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    ),
    "UnquantizedLinearMethod": Seam(
        "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod",
        members=("create_weights", "apply"),
    ),
    "UnquantizedEmbeddingMethod": Seam(
        "sglang.srt.layers.quantization.unquant:UnquantizedEmbeddingMethod",
        members=("apply", "embedding"),
    ),
    # -- plug-in, arguments and server ----------------------------------------------------
    "CustomSpecAlgo": Seam(
        "sglang.srt.speculative.spec_registry:CustomSpecAlgo",
        members=("has_draft_kv", "handle_server_args", "supports_grammar_overlap"),
    ),
    "get_registered_algorithm": Seam(
        "sglang.srt.speculative.spec_registry:get_spec", parameters=("name",)
    ),
    "SpeculativeAlgorithm": Seam(
        "sglang.srt.speculative.spec_info:SpeculativeAlgorithm", members=("register",)
    ),
    "FutureMap": Seam(
        "sglang.srt.managers.overlap_utils:FutureMap",
        parameters=(
            "device",
            "spec_algo",
            "req_to_token_pool",
            "needs_cpu_seq_lens",
            "needs_confidence_relay",
        ),
    ),
    "HookRegistry": Seam(
        "sglang.srt.plugins.hook_registry:HookRegistry", members=("register", "apply_hooks")
    ),
    "HookType": Seam("sglang.srt.plugins.hook_registry:HookType", members=("AROUND", "REPLACE")),
    "load_plugins": Seam("sglang.srt.plugins:load_plugins"),
    "prepare_server_args": Seam("sglang.srt.server_args:prepare_server_args", parameters=("argv",)),
    "ServerArgs": Seam("sglang.srt.server_args:ServerArgs", members=("add_cli_args",)),
    "run_server": Seam("sglang.launch_server:run_server", parameters=("server_args",)),
    "kill_process_tree": Seam(
        "sglang.srt.utils:kill_process_tree", parameters=("parent_pid", "include_parent")
    ),
    "http_app": Seam("sglang.srt.entrypoints.http_server:app"),
    "launch_server": Seam(
        "sglang.srt.entrypoints.http_server:launch_server", parameters=("execute_warmup_func",)
    ),
    "execute_server_warmup": Seam(
        "sglang.srt.entrypoints.http_server:_execute_server_warmup", parameters=("server_args",)
    ),
    "get_global_state": Seam("sglang.srt.entrypoints.http_server:get_global_state"),
    "ServerStatus": Seam(
        "sglang.srt.managers.tokenizer_manager:ServerStatus", members=("Up", "Starting")
    ),
    "TokenizerControlMixin": Seam(
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin",
        members=("get_internal_state", "set_internal_state"),
    ),
    "SetInternalStateReq": Seam(
        "sglang.srt.managers.io_struct:SetInternalStateReq", members=("server_args",)
    ),
    "AuthLevel": Seam("sglang.srt.utils.auth:AuthLevel", members=("ADMIN_OPTIONAL",)),
    "auth_level": Seam("sglang.srt.utils.auth:auth_level", parameters=("level",)),
    "UpdateHandler": Seam(
        "sglang.srt.managers.scheduler_components.internal_state:_UpdateHandler",
        parameters=("validate", "apply"),
    ),
    "UpdateRejected": Seam(
        "sglang.srt.managers.scheduler_components.internal_state:UpdateRejected"
    ),
    "state_update_handlers": Seam(
        "sglang.srt.managers.scheduler_components.internal_state:"
        "SchedulerInternalStateController._update_handlers"
    ),
    "Scheduler_run_batch": Seam(
        "sglang.srt.managers.scheduler:Scheduler.run_batch", parameters=("batch",)
    ),
    "Scheduler": Seam(
        "sglang.srt.managers.scheduler:Scheduler", members=("waiting_queue", "draft_worker")
    ),
    "BasePrefixCache": Seam(
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache", members=("evictable_size",)
    ),
    "BaseTokenToKVPoolAllocator": Seam(
        "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator",
        members=("available_size", "size", "get_kvcache"),
    ),
    "get_req_to_token_extra_context_len": Seam(
        "sglang.srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len"
    ),
    "get_alloc_reserve_per_decode": Seam(
        "sglang.srt.mem_cache.allocation_sizing:get_alloc_reserve_per_decode"
    ),
    "add_speculative_state": Seam(
        "sglang.srt.managers.scheduler_components.internal_state:"
        "SchedulerInternalStateController._add_speculative",
        parameters=("state",),
    ),
    "validate_one_request": Seam(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._validate_one_request",
        parameters=("obj", "input_ids"),
    ),
    # -- worker -----------------------------------------------------------------------------
    "BaseSpecWorker": Seam(
        "sglang.srt.speculative.base_spec_worker:BaseSpecWorker",
        members=(
            "draft_worker",
            "on_verify_complete_cpu",
            "alloc_memory_pool",
            "clear_cache_pool",
            "init_cuda_graphs",
            "target_worker",
        ),
    ),
    "SpecInput": Seam("sglang.srt.speculative.spec_info:SpecInput"),
    "SpecInputType": Seam(
        "sglang.srt.speculative.spec_info:SpecInputType", members=("DFLASH_DRAFT", "EAGLE_VERIFY")
    ),
    "EagleVerifyInput": Seam(
        "sglang.srt.speculative.eagle_info:EagleVerifyInput",
        members=(
            "draft_token",
            "custom_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "retrieve_cum_len",
            "spec_steps",
            "topk",
            "draft_token_num",
            "capture_hidden_mode",
            "seq_lens_sum",
            "seq_lens_cpu",
            "max_tree_depth",
            "tree_topk",
        ),
    ),
    "ForwardMode": Seam(
        "sglang.srt.model_executor.forward_batch_info:ForwardMode",
        members=("TARGET_VERIFY", "is_extend", "is_target_verify"),
    ),
    "ForwardBatch": Seam(
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch", members=("init_new",)
    ),
    "CaptureHiddenMode": Seam(
        "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode", members=("NULL",)
    ),
    "TpModelWorker_forward": Seam(
        "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
        parameters=("batch", "forward_batch", "is_verify"),
    ),
    "GenerationBatchResult": Seam(
        "sglang.srt.managers.utils:GenerationBatchResult",
        members=(
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "new_seq_lens",
            "next_draft_input",
            "can_run_cuda_graph",
            "speculative_num_draft_tokens",
            "speculative_output_stride",
            "extra_keep_alive_refs",
        ),
    ),
    "compute_spec_logprobs": Seam(
        "sglang.srt.layers.logprob_processor:compute_spec_logprobs",
        parameters=("batch", "logits_output", "predict", "accept_index"),
    ),
    "build_grammar_vocab_mask": Seam(
        "sglang.srt.speculative.spec_utils:build_grammar_vocab_mask",
        parameters=("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    "GrammarTree": Seam("sglang.srt.speculative.spec_utils:GrammarTree", members=("from_device",)),
    "Req": Seam(
        "sglang.srt.managers.schedule_batch:Req",
        members=("get_fill_ids", "extend_end"),
    ),
    "SamplingBatchInfo": Seam(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
        members=(
            "temperatures",
            "top_ks",
            "top_ps",
            "min_ps",
            "is_all_greedy",
            "need_top_k_sampling",
            "need_top_p_sampling",
            "logit_bias",
        ),
    ),
    "SamplingParams": Seam(
        "sglang.srt.sampling.sampling_params:SamplingParams",
        members=(
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "min_new_tokens",
            "stop_token_ids",
            "sampling_seed",
            "custom_params",
            "beam_width",
        ),
    ),
    # -- captured verify steps (cuda_graphs) ---------------------------------------------------
    "DecodeCudaGraphRunner": Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
        parameters=("model_runner", "attn_backend", "speculative_num_draft_tokens"),
        members=("captured_req_width", "capture_bs", "buffers", "can_run_graph", "model_runner"),
    ),
    "DecodeCudaGraphRunner_get_spec_info": Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:"
        "DecodeCudaGraphRunner.get_spec_info",
        parameters=("num_tokens",),
    ),
    "create_dummy_verify_input": Seam(
        "sglang.srt.speculative.spec_info:create_dummy_verify_input",
        parameters=("spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker"),
    ),
    "get_batch_sizes_to_capture": Seam(
        "sglang.srt.model_executor.runner.base_cuda_graph_runner:get_batch_sizes_to_capture",
        parameters=("model_runner", "captured_req_width", "gathered_buffer_required"),
    ),
    "ModelRunner": Seam(
        "sglang.srt.model_executor.model_runner:ModelRunner",
        members=(
            "attn_backend",
            "decode_cuda_graph_runner",
            "decode_graph_gather_requirements",
            "init_new_workspace",
            "spec_algorithm",
        ),
    ),
    "ModelRunner_max_decode_logits_rows": Seam(
        "sglang.srt.model_executor.model_runner:ModelRunner.max_decode_logits_rows"
    ),
    "ModelRunner_get_attention_backend": Seam(
        "sglang.srt.model_executor.model_runner:ModelRunner._get_attention_backend",
        parameters=("init_new_workspace",),
    ),
    "get_spec": Seam("sglang.srt.runtime_context:get_spec"),
    "get_device": Seam("sglang.srt.runtime_context:get_device"),
    "get_observability": Seam("sglang.srt.runtime_context:get_observability"),
    "get_serving": Seam("sglang.srt.runtime_context:get_serving"),
    "get_parallel": Seam("sglang.srt.runtime_context:get_parallel"),
}


def import_engine() -> None:
    """Import SGLang, which loads the platform plug-in on the way."""
    importlib.import_module("sglang")


def target(name: str) -> str:
    """Dotted path of a seam, as the engine's hook registry wants it."""
    return SEAMS[name].path.replace(":", ".")


def resolve(path: str) -> Any:
    """Import "package.module:Qualified.name"."""
    module, _, qualname = path.partition(":")
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


def __getattr__(name: str) -> Any:
    try:
        seam = SEAMS[name]
    except KeyError:
        raise AttributeError(f"{name} is not in the table of SGLang names") from None
    value = resolve(seam.path)
    globals()[name] = value
    return value
