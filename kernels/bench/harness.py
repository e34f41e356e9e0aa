"""What every benchmark of an op is made of, and how it is timed.

A `bench_<op>.py` beside this file has one function, `cases(device)`, that yields `BenchCase`s over
`sizes(device)`; `run_all.py` runs them all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

QWEN3_8B = {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
            "vocab": 151_936}  # fmt: skip
"""Sizes of Qwen3-8B's config.json."""
BATCHES, NODES, CONTEXTS = (1, 16, 64), (16, 64, 256), (1024, 8192, 32768)
"""B requests, N tree nodes, and tokens of context, on a GPU."""
CPU_BATCHES, CPU_NODES, CPU_CONTEXTS = (1, 8), (16, 64), (512,)

WARM_UPS, LEAST_REPEATS = 3, 3
MAX_SECONDS = 2.0
"""Of the repeats of one call: slow ones are repeated less often."""
SCRATCH_BYTES = 256 << 20
"""Read between calls on a GPU: more than twice the cache of any."""
CYCLES_PER_MS, MAX_SLEEP_MS = 2_000_000, 20.0
"""Of a GPU at 2 GHz; a slower one sleeps longer, which does no harm."""


@dataclass(frozen=True)
class Lazy:
    """A rival that is set up when its turn comes: one that cannot be takes nothing else with it."""

    prepare: Callable[[], Callable[[], object]]


Rival = Callable[[], object] | Lazy


@dataclass(frozen=True)
class BenchCase:
    """One op at one shape."""

    op: str
    shape: str
    """`B16 N64 ..`: sizes by their letters, words for the rest."""
    run: Callable[[], object]
    """Our op, as `ops` chooses it on this device."""
    num_bytes: int
    """Least traffic with device memory: every input read once, every output written once."""
    rivals: Mapping[str, Rival] = field(default_factory=dict)
    """What it stands beside, on the same inputs: `torch`, `sglang ..`, `flashinfer ..`."""
    num_flops: int = 0
    """Of its matrix products; 0 where bytes bound it at every size."""


@dataclass(frozen=True)
class Timing:
    """What repeated calls took, in milliseconds."""

    times_ms: tuple[float, ...]
    """On a GPU the device's, by events; elsewhere the clock's."""
    host_ms: float
    """Median until a call returned: what a GPU may have to wait for."""

    @property
    def ms(self) -> float:
        """The median."""
        return statistics.median(self.times_ms)


def sizes(device: torch.device) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Batches, nodes and contexts for this device."""
    if device.type == "cuda":
        return BATCHES, NODES, CONTEXTS
    return CPU_BATCHES, CPU_NODES, CPU_CONTEXTS


def measure(call: Callable[[], object], device: torch.device, repeats: int = 20) -> Timing:
    """Time a call, after some to warm up, in which kernels are compiled.

    On a GPU every call finds a cache without its inputs, as behind the rest of a round, and is
    queued while the device sleeps: its time is then the device's alone, unless the call waits for
    the device itself.
    """
    started = time.perf_counter()
    for _ in range(WARM_UPS):
        call()
        if time.perf_counter() - started > MAX_SECONDS:
            break
    synchronize(device)
    started = time.perf_counter()
    host_ms = _clocked(call)
    synchronize(device)
    affordable = int(MAX_SECONDS / (time.perf_counter() - started))
    repeats = min(repeats, max(LEAST_REPEATS, affordable))
    if device.type != "cuda":
        times = tuple(_clocked(call) for _ in range(repeats))
        return Timing(times, statistics.median(times))
    pairs = [_on_device(call, 1.5 * host_ms + 0.1, device) for _ in range(repeats)]
    times, host_times = zip(*pairs, strict=True)
    return Timing(times, statistics.median(host_times))


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_device(
    call: Callable[[], object], sleep_ms: float, device: torch.device
) -> tuple[float, float]:
    """Time on the device, and until the call returned, in milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Read, not written: a cache full of what has to be written first would slow the call down.
    _scratch(device).sum()
    torch.cuda._sleep(int(min(sleep_ms, MAX_SLEEP_MS) * CYCLES_PER_MS))
    start.record()
    host_ms = _clocked(call)
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end), host_ms


@cache
def _scratch(device: torch.device) -> Tensor:
    return torch.rand(SCRATCH_BYTES // 4, device=device)


def _clocked(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)
