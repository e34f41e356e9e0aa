"""What every benchmark of an op is made of, and how it is timed.

A `bench_<op>.py` beside this file has one function, `cases(device)`, that yields `BenchCase`s at
the shapes of `SHAPES`; `run_all.py` runs them all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

QWEN3_8B = {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
            "vocab": 151_936}  # fmt: skip
"""Sizes of Qwen3-8B's config.json."""
BATCHES, NODES, CONTEXTS = (1, 16, 64), (16, 64, 256), (1024, 8192, 32768)
"""B requests, N tree nodes, and tokens of context, on a GPU."""
CPU_BATCHES, CPU_NODES, CPU_CONTEXTS = (1, 8), (16, 64), (512,)


@dataclass(frozen=True)
class BenchCase:
    """One op at one shape."""

    op: str
    shape: str
    run: Callable[[], object]
    """Our op, as `ops` chooses it on this device."""
    num_bytes: int
    """Least traffic with device memory: every input read once, every output written once."""
    rivals: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    """What it stands beside, on the same inputs: `torch`, `sglang ...`, `flashinfer ...`."""


def sizes(device: torch.device) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Batches, nodes and contexts for this device."""
    if device.type == "cuda":
        return BATCHES, NODES, CONTEXTS
    return CPU_BATCHES, CPU_NODES, CPU_CONTEXTS


def median_ms(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of a call, after three to warm up: by events on a GPU, by the clock elsewhere."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        return statistics.median(_clocked(call) for _ in range(repeats))
    pairs = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def _clocked(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)
