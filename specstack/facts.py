"""What planning knows: the target's `config.json` and this machine. No torch, no network.

A Hugging Face id that was never downloaded has no facts; planning then says what it could not
check instead of guessing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specstack.hf_config import read_config
from specstack.locate import locate_target, refuse_target
from specstack_dsl import Pipeline

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """What a model's `config.json` states, under one name per fact."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    is_mla: bool = False
    is_recurrent: bool = False
    """Some layers carry a recurrent state (SSM, linear attention, short convolution)."""
    sliding_window: int | None = None
    """Tokens that windowed layers see; None when all layers see everything."""
    quantization: str | None = None
    num_parameters: int | None = None
    """Counted from the shapes of a dense decoder; None where they do not tell."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelFacts:
        """Read an HF config; raises KeyError naming a missing key."""
        return cls(**read_config(config))

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class HostFacts:
    """What this machine offers."""

    accelerator: Literal["none", "nvidia", "amd", "any"]
    """`any`: a machine that is not known, of which nothing is refused."""
    num_accelerators: int | None
    memory_bytes: int | None
    """Memory of the machine or of the container, whichever is less."""
    num_cpus: int | None

    @property
    def has_accelerator(self) -> bool:
        """Whether the device cuda can be used."""
        return self.accelerator != "none"

    @classmethod
    def detect(cls, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> HostFacts:
        """Look at device nodes, memory and CPU affinity."""
        devices = [p.name for p in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        count: int | None = len(devices)
        accelerator: Literal["none", "nvidia", "amd"] = "nvidia" if devices else "none"
        if not devices and (root / "dev/kfd").exists():
            accelerator, count = "amd", None
        if visible is not None and accelerator != "none":
            listed = [item for item in visible.split(",") if item.strip() not in ("", "-1")]
            count = len(listed) if count is None else min(count, len(listed))
            accelerator = accelerator if listed else "none"
        return cls(
            accelerator=accelerator,
            num_accelerators=count if accelerator != "none" else 0,
            memory_bytes=_memory_bytes(root),
            num_cpus=_num_cpus(),
        )

    @classmethod
    def unknown(cls) -> HostFacts:
        """The machine of whoever will run the pipeline."""
        return cls(accelerator="any", num_accelerators=None, memory_bytes=None, num_cpus=None)


def _memory_bytes(root: Path) -> int | None:
    limits: list[int] = []
    meminfo = root / "proc/meminfo"
    if meminfo.exists() and (total := re.search(r"MemTotal:\s+(\d+) kB", meminfo.read_text())):
        limits.append(int(total[1]) * 1024)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = root / "sys/fs/cgroup" / name
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits, default=None)


def _num_cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def model_facts(pipeline: Pipeline) -> ModelFacts | None:
    """Return the target's facts, None where its config is not here; raises PlanError."""
    location = locate_target(pipeline)
    config = location.config
    if location.config_file is not None:
        try:
            config = json.loads(Path(location.config_file).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise refuse_target(pipeline, f"cannot read {location.config_file}: {error}") from None
    if config is None:
        return None
    try:
        return ModelFacts.from_config(config)
    except KeyError as error:
        problem = f"has no {error.args[0]!r}"
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"is not one of a model ({error})"
    raise refuse_target(
        pipeline, f"its config.json {problem}: specstack serves decoder language models"
    )
