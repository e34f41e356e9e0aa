"""Where numbers come from: the command, the commit, versions, the device and its state."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "numpy", "flashinfer-python", "sglang", "sglang-kernel")
STATE = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem",
         "power.draw", "power.limit", "temperature.gpu")  # fmt: skip


def provenance(device: torch.device, seed: int) -> dict[str, Any]:
    """Everything that a reader needs to repeat the run; None where it cannot be known."""
    status = _output("git", "status", "--porcelain")
    return {
        "command": shlex.join([sys.executable, *sys.argv]),
        "commit": _output("git", "rev-parse", "HEAD"),
        "is_dirty": None if status is None else bool(status),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "cuda of torch": torch.version.cuda,
        },
        "device": describe(device),
        "state_before": device_state(device),
        "host": _processor(),
        "threads": torch.get_num_threads(),
        "seeds": {"torch, before each benchmark": seed},
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Name and sizes."""
    if device.type != "cuda":
        return {"kind": device.type, "name": _processor(), "capability": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": device.type,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }


def device_state(device: torch.device) -> dict[str, str] | None:
    """Driver and clocks as `nvidia-smi` reads them, where it is there."""
    if device.type != "cuda":
        return None
    index = str(device.index or 0)
    line = _output(
        "nvidia-smi", f"--id={index}", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader"
    )
    values = (line or "").split(", ")
    return dict(zip(STATE, values, strict=True)) if len(values) == len(STATE) else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
        if line.startswith("model name")
    ]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
