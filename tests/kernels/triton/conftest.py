"""Triton kernels on the CPU: interpreted, in a process of their own, writing to poisoned memory.

The interpreter replaces `triton.jit` when a kernel's module is imported, so it cannot be turned on
beside tests that import SGLang. `make test` runs this folder with TRITON_INTERPRET=1; without it
nothing here is collected, and the run says so.
"""

from __future__ import annotations

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]

POISON = {
    torch.bool: True,
    torch.uint8: 0xA5,
    torch.int32: -0x5EADBEE,
    torch.int64: -0x5EADBEEF0BAD,
}


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
