"""`Plan`: everything decided, as frozen pure data; `compile` makes it, `sglang_args` reads it.

A plan survives a JSON round trip, its hash names a run, and `origins` says of every value whether
it was written (file:line), is a default, or was derived and why. Nothing here touches torch or
SGLang: `specstack.bind` turns a plan into live parts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from specstack.calibration_file import planned_calibration
from specstack.facts import HostFacts, ModelFacts, model_facts
from specstack.graph_shapes import DECODE_BACKEND, DISABLED, GraphShape, graph_shapes, wants_graphs
from specstack.head_facts import LocatedHead, drafters, locate_heads
from specstack.locate import TargetLocation, locate_target
from specstack.models.heads.config import HeadConfig
from specstack.plan_rules import Context, broken_rules, warnings
from specstack.resolve import Resolved, resolve
from specstack_dsl import Pipeline, PlanError, load
from specstack_dsl.errors import in_file_order
from specstack_dsl.parts import BudgetPart, DrafterPart, Part
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


class FallbackPlan(_Data):
    """When collapsed acceptance turns drafting off: `specstack.budget.guard.CollapseGuard`'s."""

    accept_length: float = 1.05
    rounds: int = 200


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


class SourcePlan(_Data):
    """The text that a plan was made of."""

    file: str
    """Absolute path."""
    overrides: tuple[str, ...]


class ShapePlan(_Data):
    """Sizes that buffers and graphs are made for."""

    max_draft_budget: int
    """Largest budget of any round; 0: nothing is ever drafted."""
    max_depth: int
    """Deepest node of any tree."""
    verify_widths: tuple[int, ...]
    """Nodes per request of a verify step (root included), rising, from 1 to the largest."""
    draft_budgets: tuple[int, ...] = (0,)
    """Every budget that any policy may choose, the shadow's too, rising from 0."""


class MetricsPlan(_Data):
    """Names and detail of the metrics."""

    prefix: str
    per_position: bool
    trace: str | None = None
    """Absolute path of the folder for a trace of rounds."""
    trace_mib: int = 64


class Plan(_Data):
    """A pipeline with every choice made for one model and one machine."""

    target: TargetPlan
    drafter: PartPlan
    heads: tuple[HeadPlan, ...] = ()
    tree: PartPlan
    verify: PartPlan
    budget: PartPlan
    fallback: FallbackPlan = FallbackPlan()
    shadow: PartPlan | None = None
    """A second budget policy that decides, but does not act."""
    engine: EnginePlan
    shapes: ShapePlan
    graphs: tuple[GraphShape, ...] = ()
    """Captured verify steps, width rising; empty: verify steps run eagerly."""
    metrics: MetricsPlan
    source: SourcePlan | None = None
    """None: the pipeline was not read from a file."""
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
                "source": True,
                "metrics": {"trace", "trace_mib"},
                "target": {"path"},
                "engine": {"host", "port"},
                **{name: True for name in ("heads", "graphs") if not getattr(self, name)},
            },
        )
        for part in (data["drafter"], *data["drafter"]["options"].get("of", ())):
            part["options"].pop("checkpoint", None)
        for policy in filter(None, (data["budget"], data["shadow"])):
            policy["options"].pop("costs", None)
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
    budget, largest = pipeline.budget, max(budget for _, budget in resolved.steps)
    budgets = [one for one in budget.draft_budgets if one <= largest]
    watched = () if budget.shadow is None else budget.shadow.draft_budgets
    return ShapePlan(
        max_draft_budget=largest,
        max_depth=min(pipeline.tree.max_depth, largest),
        verify_widths=verify_widths(budgets),
        draft_budgets=tuple(sorted({0, *budgets, *watched})),
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


def _budget(pipeline: Pipeline, path: str, part: BudgetPart) -> PartPlan:
    plan = _part(part)
    costs = plan.options.get("costs", "auto")
    if costs != "auto":
        folder = pipeline.position(f"{path}.costs")
        plan.options["costs"] = os.path.abspath(folder.resolve(costs))
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


def _metrics(pipeline: Pipeline) -> MetricsPlan:
    stated = pipeline.metrics.model_dump()
    if (trace := pipeline.metrics.trace) is not None:
        stated["trace"] = os.path.abspath(pipeline.position("metrics.trace").resolve(trace))
    return MetricsPlan(**stated)


def _assemble(
    pipeline: Pipeline,
    location: TargetLocation,
    facts: ModelFacts | None,
    resolved: Resolved,
    heads: Sequence[LocatedHead],
) -> Plan:
    engine, shapes = pipeline.engine, _shapes(pipeline, resolved)
    shadow = pipeline.budget.shadow
    captures = wants_graphs(resolved.device, pipeline.speculates, engine.args)
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
        budget=_budget(pipeline, "budget", pipeline.budget),
        fallback=FallbackPlan(**pipeline.budget.fallback.model_dump()),
        shadow=None if shadow is None else _budget(pipeline, "budget.shadow", shadow),
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
        shapes=shapes,
        graphs=graph_shapes(shapes.verify_widths, resolved.steps) if captures else (),
        metrics=_metrics(pipeline),
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
    plan = compile(pipeline, model_facts=model_facts(pipeline), host_facts=host)
    source = SourcePlan(file=os.path.abspath(file), overrides=tuple(overrides))
    return plan.model_copy(update={"source": source})


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
        # By itself SGLang captures the verify step of a plug-in's algorithm without its tree mask;
        # the hooks that add it are asked for with engine.args.
        args[DECODE_BACKEND] = DISABLED
        # The first token of an answer follows the law that the verification rules follow.
        args["sampling_backend"] = "pytorch"
    args.update(engine.args)
    return {name: value for name, value in args.items() if value is not None}
