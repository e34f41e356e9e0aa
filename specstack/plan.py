"""`Plan`: everything decided, as frozen pure data; `compile` makes it, `sglang_args` reads it.

A plan survives a JSON round trip, its hash names a run, and `origins` says of every value whether
it was written (file:line), is a default, or was derived and why. Nothing here touches torch or
SGLang: `specstack.bind` turns a plan into live parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from specstack.calibration_file import planned_calibration
from specstack.facts import HostFacts, ModelFacts, model_facts
from specstack.head_facts import LocatedHead, drafters, locate_heads
from specstack.locate import TargetLocation, locate_target
from specstack.models.heads.config import HeadConfig
from specstack.plan_rules import Context, broken_rules, warnings
from specstack.resolve import Resolved, resolve
from specstack_dsl import Pipeline, PlanError, load
from specstack_dsl.errors import in_file_order
from specstack_dsl.parts import DrafterPart, Part
from specstack_dsl.parts.target import PACKAGED_PREFIX, is_folder

ALGORITHM = "SPECSTACK"
"""Name under which the worker is registered with SGLang."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetPlan(_Data):
    """The target, found."""

    model: str
    """As the pipeline names it."""
    path: str
    """What SGLang loads: a folder (which a packaged model fills when it is served) or an id."""
    dtype: str
    facts: ModelFacts | None
    """None when the model's config is not on this machine."""


class PartPlan(_Data):
    """One chosen part: `options` are the keyword arguments of `implementation`."""

    kind: str
    implementation: str
    """`module:Class`; empty for drafter none."""
    options: dict[str, Any]


class HeadPlan(_Data):
    """A trained head of the drafter."""

    place: str
    """Dotted path of its part: `drafter`, or `drafter.of.1`."""
    checkpoint: str
    """As the pipeline names it; the part's options hold where it is."""
    form: str
    config: HeadConfig | None
    """None when it is not on this machine."""


class EnginePlan(_Data):
    """SGLang's share; None leaves a value to SGLang."""

    device: str
    tp: int
    attention_backend: str
    page_size: int
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int | None
    host: str
    port: int
    args: dict[str, Any]


class ShapePlan(_Data):
    """Sizes that buffers and graphs are made for."""

    max_draft_budget: int
    """Largest budget of any round; 0: nothing is ever drafted."""
    max_depth: int
    """Deepest node of any tree."""
    verify_widths: tuple[int, ...]
    """Nodes per request of a verify step (root included), rising, from 1 to the largest."""


class MetricsPlan(_Data):
    """Names and detail of the metrics."""

    prefix: str
    per_position: bool


class Plan(_Data):
    """A pipeline with every choice made for one model and one machine."""

    target: TargetPlan
    drafter: PartPlan
    heads: tuple[HeadPlan, ...] = ()
    tree: PartPlan
    verify: PartPlan
    budget: PartPlan
    engine: EnginePlan
    shapes: ShapePlan
    metrics: MetricsPlan
    origins: dict[str, str]
    """Dotted path -> `file:line`, `default`, or `derived: why`."""
    warnings: tuple[str, ...]

    @property
    def speculates(self) -> bool:
        """Whether any round can draft."""
        return bool(self.drafter.implementation)

    @property
    def merged_drafters(self) -> tuple[str, ...]:
        """Names of a merge's drafters, in its order: kinds, numbered where one occurs twice."""
        kinds = [part["kind"] for part in self.drafter.options.get("of", ())]
        return tuple(
            kind if kinds.count(kind) == 1 else f"{kind}_{kinds[:i].count(kind)}"
            for i, kind in enumerate(kinds)
        )

    @property
    def hash(self) -> str:
        """SHA-256 of what decides the run: not of origins, warnings, local paths or addresses."""
        data = self.model_dump(
            mode="json",
            exclude={
                "origins": True,
                "warnings": True,
                "target": {"path"},
                "engine": {"host", "port"},
                **({} if self.heads else {"heads": True}),
            },
        )
        for part in (data["drafter"], *data["drafter"]["options"].get("of", ())):
            part["options"].pop("checkpoint", None)
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def verify_widths(budgets: Sequence[int]) -> tuple[int, ...]:
    """Return 1 + every budget, and the powers of two below the largest of these."""
    largest = 1 + max(budgets, default=0)
    powers = {1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest}
    return tuple(sorted({1, *powers, *(1 + budget for budget in budgets)}))


def _shapes(pipeline: Pipeline, resolved: Resolved) -> ShapePlan:
    if not pipeline.speculates:
        return ShapePlan(max_draft_budget=0, max_depth=0, verify_widths=(1,))
    budgets = [budget for _, budget in resolved.steps]
    largest = max(budgets)
    return ShapePlan(
        max_draft_budget=largest,
        max_depth=min(pipeline.tree.max_depth, largest),
        verify_widths=verify_widths(budgets),
    )


def _part(part: Part, **derived: Any) -> PartPlan:
    return PartPlan(
        kind=part.kind, implementation=part.implementation, options={**part.options, **derived}
    )


def _tree(pipeline: Pipeline) -> PartPlan:
    plan = _part(pipeline.tree)
    if "calibration" in plan.options:
        plan.options["calibration"] = planned_calibration(pipeline)
    return plan


def _drafter(pipeline: Pipeline, heads: Sequence[LocatedHead]) -> PartPlan:
    if not pipeline.speculates:
        return _part(pipeline.drafter)
    depth, located = pipeline.tree.max_depth, {head.place: head for head in heads}

    def planned(place: str, part: DrafterPart) -> PartPlan:
        head = located.get(place)
        if head is None:
            return _part(part, max_depth=depth)
        reach = depth
        if pipeline.drafter.members and head.config and head.config.form == "block":
            reach = min(depth, head.config.block_size - 1)  # others may go deeper
        plan = _part(part, max_depth=reach, checkpoint=head.path, search=pipeline.tree.search)
        width, search = plan.options.pop("width"), plan.options["search"]
        if width is not None and "paths" not in search:
            search["width"] = min(width, search.get("width") or width)  # it never widens
        if pipeline.tree.options.get("calibration") is not None and "paths" not in search:
            search["calibrated"] = True
        return plan

    parts = [planned(place, part) for place, part in drafters(pipeline)]
    if pipeline.drafter.members is None:
        return parts[0]
    return _part(
        pipeline.drafter, of=[part.model_dump(mode="json") for part in parts], max_depth=depth
    )


def _assemble(
    pipeline: Pipeline,
    location: TargetLocation,
    facts: ModelFacts | None,
    resolved: Resolved,
    heads: Sequence[LocatedHead],
) -> Plan:
    engine = pipeline.engine
    return Plan(
        target=TargetPlan(
            model=pipeline.target.model, path=location.path, dtype=resolved.dtype, facts=facts
        ),
        drafter=_drafter(pipeline, heads),
        heads=tuple(
            HeadPlan(
                place=head.place,
                checkpoint=head.part.checkpoint,
                form=head.part.kind,
                config=head.config,
            )
            for head in heads
        ),
        tree=_tree(pipeline),
        verify=_part(pipeline.verify),
        budget=_part(pipeline.budget),
        engine=EnginePlan(
            device=resolved.device,
            tp=engine.tp,
            attention_backend=resolved.attention_backend,
            page_size=resolved.page_size,
            max_running_requests=resolved.max_running_requests,
            max_total_tokens=resolved.max_total_tokens,
            context_length=resolved.context_length,
            host=engine.host,
            port=engine.port,
            args=engine.args,
        ),
        shapes=_shapes(pipeline, resolved),
        metrics=MetricsPlan(**pipeline.metrics.model_dump()),
        origins=resolved.origins,
        warnings=(),
    )


def compile(pipeline: Pipeline, *, model_facts: ModelFacts | None, host_facts: HostFacts) -> Plan:
    """Resolve every `auto`, derive shapes, and check against model and machine.

    Raises PlanError with every contradiction, each naming both sides.
    """
    location = locate_target(pipeline)
    heads = locate_heads(pipeline)
    resolved = resolve(pipeline, model_facts, host_facts)
    plan = _assemble(pipeline, location, model_facts, resolved, heads)
    context = Context(pipeline, plan, resolved.steps, host_facts)
    problems = list(broken_rules(context))
    if problems:
        raise PlanError(in_file_order(problems))
    return plan.model_copy(update={"warnings": tuple(warnings(context))})


def plan_file(
    file: str | Path, overrides: Sequence[str] = (), *, host_facts: HostFacts | None = None
) -> Plan:
    """Read a pipeline file and compile it for this machine (or `host_facts`)."""
    pipeline = load(file, overrides)
    host = HostFacts.detect() if host_facts is None else host_facts
    return compile(pipeline, model_facts=model_facts(pipeline), host_facts=host)


def served_name(model: str) -> str:
    """The name that clients and metrics see: a packaged model's own, a folder's last part."""
    if model.startswith(PACKAGED_PREFIX):
        return model.removeprefix(PACKAGED_PREFIX)
    return Path(model).name if is_folder(model) else model


def sglang_args(plan: Plan) -> dict[str, Any]:
    """Return the SGLang server arguments of a plan, by field name; None is left out."""
    engine = plan.engine
    args: dict[str, Any] = {
        "model_path": plan.target.path,
        "served_model_name": served_name(plan.target.model),
        "dtype": plan.target.dtype,
        "device": engine.device,
        "tp_size": engine.tp,
        "attention_backend": engine.attention_backend,
        "page_size": engine.page_size,
        "max_running_requests": engine.max_running_requests,
        "max_total_tokens": engine.max_total_tokens,
        "context_length": engine.context_length,
        "host": engine.host,
        "port": engine.port,
        "enable_metrics": True,
    }
    if plan.speculates:
        args["speculative_algorithm"] = ALGORITHM
    if engine.device == "cpu":
        args["cuda_graph_backend_decode"] = args["cuda_graph_backend_prefill"] = "disabled"
    elif plan.speculates:
        # SGLang captures the verify step of a plug-in's algorithm without its tree mask.
        args["cuda_graph_backend_decode"] = "disabled"
        # The first token of an answer follows the law that the verification rules follow.
        args["sampling_backend"] = "pytorch"
    args.update(engine.args)
    return {name: value for name, value in args.items() if value is not None}
