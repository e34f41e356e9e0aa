"""The platform class that SGLang instantiates, and the hooks that have no platform seam."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu import ops

ATTENTION_BACKEND = "specstack_cpu"


class SpecstackCpuPlatform(sgl.CpuDeviceMixin, sgl.SRTPlatform):  # type: ignore[misc]
    """SGLang's out-of-tree platform for x86 and ARM machines without an accelerator."""

    # Not PlatformEnum.CPU: that one is the in-tree engine, which needs a source-built sgl-kernel.
    _enum = sgl.PlatformEnum.OOT
    capabilities = sgl.PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Replace SGLang's choice for a CPU, made just before: its kernels are not in the wheel."""
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = ATTENTION_BACKEND

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from specstack_serving.cpu.pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def get_speculative_cache_locs_fn(self) -> Callable[..., Tensor]:
        from specstack_serving.cpu.pool import speculative_cache_locs

        return speculative_cache_locs

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def init_backend(self) -> None:
        ops.register()

    def get_dispatch_key_name(self) -> str:
        return ops.DISPATCH_KEY

    def post_load_model(self, model: nn.Module) -> None:
        from specstack_serving.cpu.linear import pack_linears

        pack_linears(model)


@cache
def install() -> None:
    """Register the attention backend and replace what reaches Triton without a platform seam."""
    from specstack_serving.cpu.pool import assign_req_to_token_pool

    sgl.add_attention_backend_choices([ATTENTION_BACKEND])
    sgl.register_attention_backend(ATTENTION_BACKEND)(_attention_backend)
    sgl.HookRegistry.register(
        sgl.target("assign_req_to_token_pool_func"),
        assign_req_to_token_pool,
        sgl.HookType.REPLACE,
    )


def _attention_backend(model_runner: Any) -> Any:
    from specstack_serving.cpu.attention_backend import CpuAttentionBackend

    return CpuAttentionBackend(model_runner)
