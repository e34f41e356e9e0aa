"""What `auto` becomes on a machine, and where every value of a plan came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, cast

from specstack.facts import HostFacts, ModelFacts
from specstack_dsl import Pipeline
from specstack_dsl.parts import (
    CONTRACTS,
    SINGLE,
    BudgetPart,
    DrafterPart,
    HeadPart,
    Part,
    Section,
    TreePart,
)

CPU_MAX_RUNNING_REQUESTS = 16
CPU_MAX_TOTAL_TOKENS = 32768
CPU_KV_SHARE = 0.25
"""Share of the memory that the KV cache may take on a CPU."""

T = TypeVar("T")
Steps = tuple[tuple[int | None, int], ...]


@dataclass
class Resolved:
    """Values that `auto` may stand for, and the origin of every value."""

    device: str
    dtype: str
    attention_backend: str
    page_size: int
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int | None
    steps: Steps
    """The steps of the budget that batches of the engine can reach."""
    origins: dict[str, str] = field(default_factory=dict)


def _written(pipeline: Pipeline, path: str) -> str:
    return pipeline.positions[path].origin if pipeline.states(path) else "default"


def _stated_origins(pipeline: Pipeline) -> dict[str, str]:
    """Origins of what the language decides: kinds and options, stated or default."""
    origins: dict[str, str] = {}
    for name in (*SINGLE, *CONTRACTS):
        origins |= _section_origins(pipeline, name, getattr(pipeline, name))
    return origins


def _section_origins(pipeline: Pipeline, name: str, section: Section) -> dict[str, str]:
    origins: dict[str, str] = {}
    options = list(type(section).model_fields)
    if isinstance(section, Part):
        kind = f"{name}.kind"
        # Inside another part a part may be written as its name, which is all there is of it then.
        is_name = name not in CONTRACTS and not pipeline.states(kind)
        origins[kind] = _written(pipeline, name if is_name else kind)
        if section.nested is not None:
            options.remove(section.nested)
            for index, member in enumerate(getattr(section, section.nested)):
                place = f"{name}.{section.nested}.{index}"
                origins |= _section_origins(pipeline, place, member)
        if section.inner is not None:
            options.remove(section.inner)
            inside = getattr(section, section.inner)
            if inside is not None:
                origins |= _section_origins(pipeline, f"{name}.{section.inner}", inside)
    if isinstance(section, BudgetPart):
        options.remove("fallback")
        if name in CONTRACTS:
            options += [f"fallback.{option}" for option in type(section.fallback).model_fields]
    if isinstance(section, TreePart):
        options = [option for option in options if option in section.options]
    for option in options:
        path = f"{name}.{option}"
        origins[path] = _written(pipeline, path)
    if isinstance(section, DrafterPart) and section.implementation:
        origins[f"{name}.max_depth"] = "derived: the depth of the tree"
    if isinstance(section, HeadPart):
        width = origins.pop(f"{name}.width")
        origins[f"{name}.search"] = "derived: the tree" if section.width is None else width
        for option in section.options.keys() - type(section).model_fields:
            origins[f"{name}.{option}"] = "derived: the options above"
        for option in section.statements:
            if not pipeline.states(f"{name}.{option}"):
                origins[f"{name}.{option}"] = "derived: the checkpoint"
    return origins


class _Autos:
    """Resolves one value after the other and notes why."""

    def __init__(self, pipeline: Pipeline, origins: dict[str, str]) -> None:
        self.pipeline = pipeline
        self.origins = origins

    def __call__(self, path: str, derived: T, why: str) -> T:
        """Return what the pipeline states at `path`, or `derived` where that is `auto`."""
        section, option = path.split(".")
        stated: T | str = getattr(getattr(self.pipeline, section), option)
        if stated == "auto":
            self.origins[path] = f"derived: {why}"
            return derived
        return cast(T, stated)


def _dtype(auto: _Autos, device: str, facts: ModelFacts | None) -> str:
    if device == "cpu":
        return auto("target.dtype", "float32", "device is cpu")
    if facts is None:
        return auto("target.dtype", "auto", "SGLang reads the checkpoint's")
    return auto("target.dtype", facts.dtype, "the checkpoint's")


def _cpu_tokens(
    facts: ModelFacts | None, dtype: str, host: HostFacts, requests: int, context: int | None
) -> tuple[int, str]:
    """Return the slots of the KV cache on a CPU, a multiple of 1024, and the reason."""
    longest = context or (facts.max_position_embeddings if facts else None)
    bounds = {f"the bound of {CPU_MAX_TOTAL_TOKENS}": CPU_MAX_TOTAL_TOKENS}
    if longest is not None:
        bounds[f"{requests} requests of {longest} tokens"] = requests * longest
    if facts is not None and host.memory_bytes is not None:
        per_token = facts.kv_bytes_per_token(dtype)
        share = f"{CPU_KV_SHARE:.0%} of {host.memory_bytes / 2**30:.0f} GiB"
        bounds[f"{share} at {per_token} bytes per token"] = int(
            CPU_KV_SHARE * host.memory_bytes / per_token
        )
    why, tokens = min(bounds.items(), key=lambda item: item[1])
    return max(1024, tokens // 1024 * 1024), why


def _reachable(steps: Steps, max_running_requests: int | None) -> Steps:
    """Drop the steps for batches that the engine never runs."""
    most = max_running_requests
    batches = (None, *(batch for batch, _ in steps))
    return tuple(
        step
        for before, step in zip(batches, steps, strict=False)
        if before is None or most is None or before < most
    )


def resolve(pipeline: Pipeline, facts: ModelFacts | None, host: HostFacts) -> Resolved:
    """Decide every `auto` for this model and machine."""
    origins = _stated_origins(pipeline)
    auto = _Autos(pipeline, origins)
    seen = "an accelerator is visible" if host.has_accelerator else "no accelerator is visible"
    device = auto("engine.device", "cuda" if host.has_accelerator else "cpu", seen)
    on_cpu = device == "cpu"
    dtype = _dtype(auto, device, facts)
    longest = facts.max_position_embeddings if facts else None
    own = f"the model's own {longest}" if longest else "the model's own"
    context: int | None = auto("engine.context_length", None, own)
    requests: int | None = auto(
        "engine.max_running_requests",
        CPU_MAX_RUNNING_REQUESTS if on_cpu else None,
        "device is cpu" if on_cpu else "SGLang sizes it from device memory",
    )
    tokens, why = None, "SGLang sizes it from device memory"
    if on_cpu:
        tokens, why = _cpu_tokens(facts, dtype, host, requests or 1, context)
    return Resolved(
        device=device,
        dtype=dtype,
        attention_backend=auto(
            "engine.attention_backend",
            "specstack_cpu" if on_cpu else "triton",
            "the tree masks of the CPU platform" if on_cpu else "it takes tree masks of any width",
        ),
        page_size=auto("engine.page_size", 1, "paths of a tree end inside a page"),
        max_running_requests=requests,
        max_total_tokens=auto("engine.max_total_tokens", tokens, why),
        context_length=context,
        steps=_reachable(pipeline.budget.steps, requests),
        origins=origins,
    )
