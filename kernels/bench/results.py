"""Times as numbers to judge: shares of what the device can do, ratios to rivals, the JSON file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import Timing, measure

COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Bounds:
    """What a device does at most, measured."""

    copy_bytes_per_s: float
    """A large copy within its memory, bytes read plus bytes written."""
    matmul_flops_per_s: float
    """A large matrix product: of bfloat16 on a GPU, float32 elsewhere."""

    def copy_ms(self, num_bytes: int) -> float:
        """Least time for so much traffic."""
        return 1e3 * num_bytes / self.copy_bytes_per_s

    def matmul_ms(self, num_flops: int) -> float:
        """Least time for so many operations of matrix products."""
        return 1e3 * num_flops / self.matmul_flops_per_s


def measure_bounds(device: torch.device, repeats: int) -> Bounds:
    """Copy and multiply random numbers."""
    source = torch.rand(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, repeats)
    size = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn((size, size), device=device, dtype=dtype) for _ in range(2))
    product = measure(lambda: a @ b, device, repeats)
    return Bounds(2e3 * source.nbytes / copy.ms, 2e3 * size**3 / product.ms)


@dataclass(frozen=True)
class Result:
    """One case: its time, or why there is none."""

    op: str
    shape: str
    num_bytes: int
    num_flops: int
    timing: Timing | None
    rivals: Mapping[str, Timing | str] = field(default_factory=dict)
    """Their times, or why there is none."""
    error: str | None = None

    def sizes(self) -> dict[str, int]:
        """The shape's sizes by their letters."""
        return {letter: int(size) for letter, size in re.findall(r"\b([A-Z])(\d+)\b", self.shape)}

    def gb_per_s(self) -> float | None:
        """Least traffic over time."""
        return self.num_bytes / self.timing.ms / 1e6 if self.timing else None

    def share_of_copy(self, bounds: Bounds) -> float | None:
        """Of a copy's bandwidth."""
        return bounds.copy_ms(self.num_bytes) / self.timing.ms if self.timing else None

    def share_of_bound(self, bounds: Bounds) -> float | None:
        """Of what the device can do at most: bytes or operations, whichever take longer."""
        least = max(bounds.copy_ms(self.num_bytes), bounds.matmul_ms(self.num_flops))
        return least / self.timing.ms if self.timing else None

    def ratio(self, rival: str) -> float | None:
        """Our time over the rival's: below 1 is faster."""
        theirs = self.rivals[rival]
        return self.timing.ms / theirs.ms if self.timing and isinstance(theirs, Timing) else None

    def as_json(self, bounds: Bounds) -> dict[str, Any]:
        """Everything, raw times included."""
        return {
            "op": self.op,
            "shape": self.shape,
            "num_bytes": self.num_bytes,
            "num_flops": self.num_flops,
            **_timing_json(self.timing),
            "gb_per_s": self.gb_per_s(),
            "share_of_copy": self.share_of_copy(bounds),
            "share_of_bound": self.share_of_bound(bounds),
            "rivals": {
                name: {"error": theirs, "ratio": None, **_timing_json(None)}
                if isinstance(theirs, str)
                else {"error": None, "ratio": self.ratio(name), **_timing_json(theirs)}
                for name, theirs in self.rivals.items()
            },
            "error": self.error,
        }


def _timing_json(timing: Timing | None) -> dict[str, Any]:
    if timing is None:
        return {"ms": None, "host_ms": None, "times_ms": []}
    return {"ms": timing.ms, "host_ms": timing.host_ms, "times_ms": list(timing.times_ms)}


class ResultFile:
    """A JSON object that is whole after every change of it, also if the run is killed then."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path = path
        self.content = content
        self.write()

    def write(self, **changes: Any) -> None:
        """Change keys and write all of it."""
        self.content.update(changes)
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps(self.content, indent=1) + "\n", "utf-8")
        os.replace(new, self._path)
