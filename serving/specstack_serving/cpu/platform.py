"""The platform class that SGLang instantiates, and the hooks that have no platform seam."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu import ops

ATTENTION_BACKEND = "specstack_cpu"
# Turns that an OpenMP thread waits before it sleeps. With GNU's default (300,000) any other busy
# process on the machine slows a step 5 to 10 times; never waiting costs 40 % of a step in wake-ups,
# this many about 10 %. Inherited by the processes that SGLang spawns.
SPIN_COUNT = "10000"


class SpecstackCpuPlatform(sgl.CpuDeviceMixin, sgl.SRTPlatform):  # type: ignore[misc]
    """SGLang's out-of-tree platform for x86 and ARM machines without an accelerator."""

    # Not PlatformEnum.CPU: that one is the in-tree engine, which needs a source-built sgl-kernel.
    _enum = sgl.PlatformEnum.OOT
    capabilities = sgl.PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Replace SGLang's choice for a CPU, made just before: its kernels are not in the wheel."""
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = ATTENTION_BACKEND
        share_cores(server_args.tp_size * server_args.dp_size * server_args.pp_size)

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_compile_backend(self, mode: str | None = None) -> str:
        """SGLang compiles a few sampling functions; inductor would need a C++ compiler here."""
        return "eager"

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
        from specstack_serving.cpu.llama import straighten

        pack_linears(model)
        straighten(model)


def share_cores(num_ranks: int) -> None:
    """Give every rank its part of this process's cores, unless the user has said otherwise.

    SGLang accepts more ranks than NUMA nodes only with an explicit binding, and would let every
    rank run as many threads as there are cores. Spawned ranks inherit the environment.
    """
    if num_ranks == 1:
        return
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_ranks)
    groups = [[cores[(r * share + i) % len(cores)] for i in range(share)] for r in range(num_ranks)]
    binding = "|".join(",".join(map(str, group)) for group in groups)
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))


@cache
def install() -> None:
    """Register the attention backend and replace what reaches Triton without a platform seam."""
    from specstack_serving.cpu.pool import assign_req_to_token_pool, get_last_loc

    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    sgl.add_attention_backend_choices([ATTENTION_BACKEND])
    sgl.register_attention_backend(ATTENTION_BACKEND)(_attention_backend)
    replace = sgl.HookType.REPLACE
    sgl.HookRegistry.register(
        sgl.target("assign_req_to_token_pool_func"), assign_req_to_token_pool, replace
    )
    sgl.HookRegistry.register(sgl.target("get_last_loc"), get_last_loc, replace)


def _attention_backend(model_runner: Any) -> Any:
    from specstack_serving.cpu.attention_backend import CpuAttentionBackend

    return CpuAttentionBackend(model_runner)
