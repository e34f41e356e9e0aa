"""The CPU platform: stock SGLang on a machine without a GPU or a driver.

`activate` is the entry point `sglang.srt.platforms`. Packed linears live in `linear`, attention
in `attention`, the KV pool in `pool`, elementwise layers in `ops`; `platform` wires them.
"""

from __future__ import annotations

PLATFORM = "specstack_serving.cpu.platform.SpecstackCpuPlatform"


def activate() -> str | None:
    """Path of the platform class when the exported plan runs on the CPU, else None.

    SGLang asks every installed platform and lets a single answer win over CUDA, so anything but
    an explicit CPU plan must answer None.
    """
    from specstack_serving.carrier import current_plan

    plan = current_plan()
    return PLATFORM if plan is not None and plan.engine.device == "cpu" else None
