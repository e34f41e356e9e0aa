"""Which implementation runs where: what `choices` says is what `ops` does."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import torch

from specstack_kernels import ops
from specstack_kernels.choices import GPU_KERNELS, TORCH_ONLY, implementations


def test_every_op_has_a_choice_on_every_device():
    public = set(ops.__all__) - {"count_mask_bytes"}  # of the host
    for device in ("cpu", "cuda"):
        assert set(implementations(device)) == public
    assert set(implementations("cpu").values()) == {"torch"}
    assert set(GPU_KERNELS) | set(TORCH_ONLY) == public
    assert not set(GPU_KERNELS) & set(TORCH_ONLY)


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_every_kernel_has_the_name_and_the_parameters_of_its_definition(name):
    def parameters(package):
        function = getattr(import_module(f"specstack_kernels.{package}.{name}"), name)
        return function.__annotations__.keys(), function.__kwdefaults__

    assert parameters("reference") == parameters("torch_ops") == parameters("triton")


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_tensors_on_a_gpu_go_to_triton(name, monkeypatch):
    calls = []
    module = import_module(f"specstack_kernels.triton.{name}")
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append((args, kwargs)))
    ops._kernel.cache_clear()
    tensor = torch.zeros(2).as_subclass(OnGpu)
    first = [tensor, tensor] if name == "move_kv" else tensor
    getattr(ops, name)(first, "rest", option=1)
    assert calls == [((first, "rest"), {"option": 1})]
    ops._kernel.cache_clear()


def test_a_cpu_needs_neither_triton_nor_flashinfer():
    code = (
        "import sys, specstack_kernels.ops\n"
        "found = [m for m in sys.modules if m.startswith('specstack_kernels.')]\n"
        "assert not any('triton' in m or 'flashinfer' in m for m in found), found\n"
        "assert 'flashinfer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
