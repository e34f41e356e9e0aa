"""When the platform is chosen, what it refuses, and how ranks share the cores."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from specstack_serving import carrier
from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu import PLATFORM, activate
from specstack_serving.cpu.attention_backend import CpuAttentionBackend
from specstack_serving.cpu.platform import SpecstackCpuPlatform, share_cores


@pytest.mark.parametrize(("device", "expected"), [(None, None), ("cuda", None), ("cpu", PLATFORM)])
def test_only_a_cpu_plan_activates_the_platform(
    device: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = None if device is None else SimpleNamespace(engine=SimpleNamespace(device=device))
    monkeypatch.setattr(carrier, "current_plan", lambda: plan)
    assert activate() == expected


def test_the_activated_path_names_the_platform_class() -> None:
    module, _, name = PLATFORM.rpartition(".")
    assert sgl.resolve(f"{module}:{name}") is SpecstackCpuPlatform
    assert SpecstackCpuPlatform().is_out_of_tree()


def arguments(backend: str, tp_size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(attention_backend=backend, tp_size=tp_size, dp_size=1, pp_size=1)


def test_the_users_attention_backend_stays() -> None:
    chosen, default = arguments("torch_native"), arguments("intel_amx")
    SpecstackCpuPlatform().apply_server_args_defaults(chosen)
    SpecstackCpuPlatform().apply_server_args_defaults(default)
    assert chosen.attention_backend == "torch_native"
    assert default.attention_backend == "specstack_cpu"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment whose later changes are undone."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    return monkeypatch


@pytest.mark.parametrize(
    ("cores", "num_ranks", "binding", "threads"),
    [
        ({0, 1}, 2, "0|1", "1"),
        ({2, 3, 6, 7, 8}, 2, "2,3|6,7", "2"),
        ({5}, 2, "5|5", "1"),
        ({0, 1}, 1, None, None),
    ],
)
def test_ranks_share_the_cores(
    environment: pytest.MonkeyPatch,
    cores: set[int],
    num_ranks: int,
    binding: str | None,
    threads: str | None,
) -> None:
    environment.setattr(os, "sched_getaffinity", lambda pid: cores)
    share_cores(num_ranks)
    assert os.environ.get("SGLANG_CPU_OMP_THREADS_BIND") == binding
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_a_binding_of_the_user_stays(environment: pytest.MonkeyPatch) -> None:
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "1|0"
    share_cores(2)
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "1|0"


def model_runner(**changes: Any) -> SimpleNamespace:
    layer = sgl.RadixAttention(4, 16, 0.25, 2, layer_id=0)
    for name, value in changes.items():
        setattr(layer, name, value)
    model = nn.Module()
    model.attn = layer
    return SimpleNamespace(
        model=model,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        req_to_token_pool=None,
        token_to_kv_pool=None,
    )


def test_full_causal_attention_is_accepted() -> None:
    CpuAttentionBackend(model_runner())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window_size": 128}, "attn has a sliding window of 128"),
        ({"logit_cap": 30.0}, "attn caps its logits at 30.0"),
        ({"attn_type": sgl.AttentionType.ENCODER_ONLY}, "attn is not causal self-attention"),
        ({"v_head_dim": 8}, "attn has keys of 16, values of 8"),
    ],
)
def test_other_attention_is_refused_at_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CpuAttentionBackend(model_runner(**changes))


def test_a_kv_cache_of_another_type_is_refused() -> None:
    runner = model_runner()
    runner.kv_cache_dtype = torch.float8_e5m2
    with pytest.raises(ValueError, match=r"use --kv-cache-dtype auto"):
        CpuAttentionBackend(runner)


def test_a_mask_of_the_wrong_size_is_refused() -> None:
    backend = CpuAttentionBackend(model_runner())
    backend.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(2, 8, dtype=torch.int32))
    batch = SimpleNamespace(
        forward_mode=sgl.ForwardMode.TARGET_VERIFY,
        batch_size=1,
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([4]),
        spec_info=SimpleNamespace(draft_token_num=3, custom_mask=torch.ones(21, dtype=torch.bool)),
    )
    with pytest.raises(ValueError, match="the tree mask has 21 entries, but 1 requests of 3"):
        backend.init_forward_metadata(batch)
