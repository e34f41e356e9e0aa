"""Triton kernels, written to poisoned memory: interpreted on the CPU, or compiled on a GPU.

The interpreter replaces `triton.jit` when a kernel's module is imported, so it cannot be turned on
beside tests that import SGLang. `make test` runs this folder with TRITON_INTERPRET=1, in a process
of its own. Where there is a GPU and no interpreter, the same tests run there: the ops of a test
module take and return CPU tensors, and compute on the GPU. With neither, nothing here is
collected, and the run says so.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch

from specstack_kernels.testing_devices import on_device

HERE = Path(__file__).parent
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_ON_GPU = not IS_INTERPRETED and torch.cuda.is_available()
DEVICE = torch.device("cuda")
IS_SAID = pytest.StashKey[bool]()
collect_ignore_glob = [] if IS_INTERPRETED or IS_ON_GPU else ["test_*.py"]

POISON = {
    torch.bool: True,
    torch.uint8: 0xA5,
    torch.int32: -0x5EADBEE,
    torch.int64: -0x5EADBEEF0BAD,
}


def how_kernels_run():
    """One line for the run's head or end."""
    if IS_INTERPRETED:
        return "Triton kernels: interpreted (TRITON_INTERPRET=1)"
    if IS_ON_GPU:
        return f"Triton kernels: compiled, on {torch.cuda.get_device_name(DEVICE)}"
    return (
        "Triton kernels: not tested, for want of a GPU; interpreted they are tested by "
        "TRITON_INTERPRET=1 python -m pytest tests/kernels/triton"
    )


def pytest_report_header(config):
    """If this file is loaded before the run begins."""
    config.stash[IS_SAID] = True
    return how_kernels_run()


def pytest_terminal_summary(terminalreporter, config):
    """If it is loaded by then, as in a run of all tests."""
    if not config.stash.get(IS_SAID, False):
        terminalreporter.write_line(how_kernels_run())


def pytest_collection_modifyitems(items):
    """Mark what needs a GPU."""
    for item in items:
        if IS_ON_GPU and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


def ops_of(module):
    """Functions by their names in a test module that come from a kernel's module."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__.startswith("specstack_kernels.triton.")
    }


@pytest.fixture(autouse=True)
def ops_on_the_gpu(request, monkeypatch):
    """What a test calls runs on the GPU; constants of kernel modules stay where they are."""
    if IS_ON_GPU:
        for name, op in ops_of(request.module).items():
            monkeypatch.setattr(request.module, name, on_device(op, DEVICE))


def poison(tensor):
    """Fill with what no kernel may leave behind: NaN, or numbers that nothing here computes."""
    value = POISON.get(tensor.dtype, float("nan"))
    return tensor.fill_(value)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """What `torch.empty` and its kin return holds poison: a kernel writes every element it owns."""

    def poisoning(make):
        return lambda *args, **kwargs: poison(make(*args, **kwargs))

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


@pytest.fixture(autouse=IS_INTERPRETED)
def bfloat16_dots(monkeypatch):
    """The interpreter keeps bfloat16 as integers, and multiplies those; widen them, as is exact."""
    import triton.runtime.interpreter as interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(builder, handle):
        tl = interpreter.tl
        is_bfloat16 = handle.dtype.scalar == tl.bfloat16
        return builder.cast_impl(handle, tl.float32) if is_bfloat16 else handle

    def widening(self, a, b, *rest):
        return create_dot(self, widened(self, a), widened(self, b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widening)
