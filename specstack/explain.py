"""What `specstack explain` says of a plan: as data, and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specstack import memory
from specstack.graph_shapes import described, graph_index_bytes
from specstack.head_rules import stated
from specstack.locate import locate_target
from specstack.plan import HeadPlan, PartPlan, Plan, sglang_args
from specstack_dsl import Pipeline
from specstack_dsl.engine_args import PER_REQUEST_LIMITS, REFUSED_WITH_DRAFTS
from specstack_kernels.choices import implementations

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Explanation:
    """A plan with what follows from it."""

    plan: Plan
    target_note: str
    values: tuple[tuple[str, Any, str], ...]
    """(dotted path, value, origin)."""
    memory_bytes: dict[str, int | None]
    unsupported: dict[str, str]
    """Feature -> why it does not work with this plan."""
    kernels: dict[str, str]
    """Op -> what runs it on the plan's device, if it is called."""

    def as_data(self) -> dict[str, Any]:
        """The form of `--format json`."""
        plan = self.plan
        return {
            "hash": plan.hash,
            "target": {"path": plan.target.path, "found": self.target_note},
            "values": [
                {"path": path, "value": value, "origin": origin}
                for path, value, origin in self.values
            ],
            "sglang_args": sglang_args(plan),
            "shapes": plan.shapes.model_dump(mode="json"),
            "graphs": {shape.width: described(plan, shape) for shape in plan.graphs},
            "memory_bytes": self.memory_bytes,
            "unsupported": self.unsupported,
            "kernels": self.kernels,
            "warnings": list(plan.warnings),
        }


def flat_values(plan: Plan) -> dict[str, Any]:
    """Return {dotted path: value} of every decision, in pipeline order."""
    values: dict[str, Any] = {"target.model": plan.target.model, "target.dtype": plan.target.dtype}
    for name in ("drafter", "tree", "verify", "budget"):
        values |= _part_values(name, getattr(plan, name))
        if name == "drafter":
            for head in plan.heads:
                values |= _head_values(head)
    fallback = plan.fallback.model_dump(mode="json")
    values |= {f"budget.fallback.{option}": value for option, value in fallback.items()}
    if plan.shadow is not None:
        values |= _part_values("budget.shadow", plan.shadow)
    for name in ("engine", "metrics"):
        section = getattr(plan, name).model_dump(mode="json")
        values |= {f"{name}.{option}": value for option, value in section.items()}
    return values


def _part_values(name: str, part: PartPlan) -> dict[str, Any]:
    values: dict[str, Any] = {f"{name}.kind": part.kind}
    for option, value in part.options.items():
        if option != "of":
            values[f"{name}.{option}"] = value
            continue
        for index, member in enumerate(value):
            values |= _part_values(f"{name}.of.{index}", PartPlan.model_validate(member))
    return values


def _head_values(head: HeadPlan) -> dict[str, Any]:
    """What the checkpoint says of itself."""
    names = ["context", "draft_vocab"]
    if head.form == "block":
        names += ["mask", "conditioning", "block_size"]
    known = stated(head.config) if head.config else dict.fromkeys(names, "not known here")
    values = {f"{head.place}.{name}": known[name] for name in names}
    return {path: "all tokens" if value is None else value for path, value in values.items()}


def _unsupported(plan: Plan) -> dict[str, str]:
    features: dict[str, str] = {}
    if plan.engine.device == "cpu":
        features["CUDA graphs"] = "the device is cpu"
    if not plan.speculates:
        return features
    if plan.verify.kind == "greedy":
        features["temperature above 0"] = "verify is greedy: use sample_and_walk"
    for refusal in REFUSED_WITH_DRAFTS.values():
        features[refusal.feature] = f"{refusal.reason}; {refusal.instead}"
    return features | PER_REQUEST_LIMITS


def _draft_memory(plan: Plan) -> dict[str, int | None]:
    if not plan.heads:
        return {}
    return {
        "draft_weights": memory.draft_weights_bytes(plan),
        "draft_kv_per_token": memory.draft_kv_bytes_per_token(plan),
        "draft_kv_cache": memory.draft_kv_pool_bytes(plan),
    }


def explain(pipeline: Pipeline, plan: Plan) -> Explanation:
    """Gather what there is to say."""
    steps = pipeline.budget.steps
    return Explanation(
        plan=plan,
        target_note=locate_target(pipeline).note,
        values=tuple((p, v, plan.origins.get(p, "default")) for p, v in flat_values(plan).items()),
        memory_bytes={
            "weights": memory.weights_bytes(plan),
            "kv_per_token": memory.kv_bytes_per_token(plan),
            "kv_cache": memory.kv_pool_bytes(plan),
            "tree_logits": memory.tree_logits_bytes(plan, steps) if plan.speculates else 0,
            **_draft_memory(plan),
            **({"graph_index": graph_index_bytes(plan)} if plan.graphs else {}),
        },
        unsupported=_unsupported(plan),
        kernels=implementations(plan.engine.device) if plan.speculates else {},
    )


def _size(size: int | None) -> str:
    if size is None:
        return "not known here"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def _table_row(row: Mapping[str, Any]) -> str:
    price = f" at survival >= {row['min_survival']}" if row["min_survival"] else ""
    return f"batch <= {row['max_batch']}: {row['draft_budget']}{price}"


def _search(search: Mapping[str, Any]) -> str:
    """Which paths a head expands."""
    if "paths" in search:
        return f"a shape of {len(search['paths'])} nodes"
    if search.get("families"):
        return f"whole families of {search['width']}"
    limits = [f"{name} {search[name]}" for name in ("width", "frontier") if search.get(name)]
    return ", ".join(["the best paths", *limits])


def _shown(path: str, value: Any) -> str:
    if path in ("budget.rows", "budget.shadow.rows"):
        return ", ".join(_table_row(row) for row in value)
    if path.endswith(".search"):
        return _search(value)
    if path == "tree.paths":
        return f"{len(value)} nodes"
    if path == "tree.calibration":
        return "none" if value is None else f"{len(value['log_factor'])} depths"
    if path == "tree.cost":
        return "none" if value is None else ", ".join(f"{n}: {ms:g} ms" for n, ms in value)
    if value is None:
        unlimited = path.endswith((".width", ".max_context", ".tpot_ms", ".ttft_ms"))
        left = "left to SGLang" if path.startswith("engine.") else "none"
        return "no limit" if unlimited else left
    return str(value).lower() if isinstance(value, bool) else str(value)


def _headline(explanation: Explanation) -> list[str]:
    plan = explanation.plan
    facts = plan.target.facts
    lines = [f"plan {plan.hash[:12]}"]
    lines.append(f"target: {plan.target.path} ({explanation.target_note})")
    if facts is not None:
        lines.append(
            f"model: {facts.architecture}, {facts.num_layers} layers, hidden {facts.hidden_size},"
            f" {facts.num_heads} heads, {facts.num_kv_heads} KV heads, vocabulary"
            f" {facts.vocab_size}, {facts.max_position_embeddings} positions"
        )
    shapes = plan.shapes
    widths = " ".join(map(str, shapes.verify_widths))
    lines.append(
        f"shapes: at most {shapes.max_draft_budget} drafts per request and round, depth"
        f" {shapes.max_depth}; nodes per verify step = drafts + 1: {widths}"
    )
    lines += [f"graphs of {one.width} nodes: {described(plan, one)}" for one in plan.graphs]
    return lines


def show(explanation: Explanation, console: Console) -> None:
    """Print the tables of `--format text`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    for line in _headline(explanation):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    values = table("Pipeline", "value", "is", "from")
    for path, value, origin in explanation.values:
        values.add_row(path, _shown(path, value), origin)
    sglang = table("SGLang arguments", "argument", "value")
    for name, value in sglang_args(explanation.plan).items():
        sglang.add_row(name, str(value))
    sizes = table("Memory", "memory", "size")
    for name, size in explanation.memory_bytes.items():
        sizes.add_row(name, _size(size))
    tables = [values, sglang, sizes]
    if explanation.kernels:
        kernels = table("Kernels", "implementation", "ops")
        for name in sorted(set(explanation.kernels.values()), reverse=True):
            ops = [op for op, chosen in explanation.kernels.items() if chosen == name]
            kernels.add_row(name, ", ".join(ops))
        tables.append(kernels)
    if explanation.unsupported:
        limits = table("Not with this plan", "feature", "why")
        for feature, reason in explanation.unsupported.items():
            limits.add_row(feature, reason)
        tables.append(limits)
    for one in tables:
        console.print(one)
    for warning in explanation.plan.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
