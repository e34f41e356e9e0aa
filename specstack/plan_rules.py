"""What a plan may not contradict: one small function per sentence, each naming both sides.

A rule yields (path, message). Rules that need a fact that is not known stay silent; `warnings`
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specstack import memory
from specstack.facts import HostFacts, ModelFacts
from specstack.graph_shapes import CAPTURED, DECODE_BACKEND, DISABLED, GRAPH_BACKENDS
from specstack.head_facts import drafters
from specstack.head_rules import HEAD_RULES, head_warnings
from specstack.resolve import Steps
from specstack_dsl import Pipeline, Problem
from specstack_dsl.parts.target import PACKAGED_PREFIX, is_folder

if TYPE_CHECKING:
    from specstack.plan import Plan

Finding = tuple[str, str]


@dataclass(frozen=True)
class Context:
    """What rules look at."""

    pipeline: Pipeline
    plan: Plan
    steps: Steps
    host: HostFacts

    @property
    def facts(self) -> ModelFacts | None:
        """The target's, if known."""
        return self.plan.target.facts


PLAN_RULES: list[Callable[[Context], Iterator[Finding]]] = [*HEAD_RULES]


def _rule(check: Callable[[Context], Iterator[Finding]]) -> Callable[[Context], Iterator[Finding]]:
    PLAN_RULES.append(check)
    return check


def broken_rules(context: Context) -> Iterator[Problem]:
    """Yield every contradiction at the place of the value to change."""
    for check in PLAN_RULES:
        for path, message in check(context):
            yield Problem(path, message, context.pipeline.position(path), check.__name__)


@_rule
def every_part_gets_what_it_needs(context: Context) -> Iterator[Finding]:
    """A part may rely only on what the target and the parts before it provide."""
    pipeline = context.pipeline
    if not pipeline.speculates:
        return
    provided = set(pipeline.target.provides)
    parts = [("tree", pipeline.tree), ("verify", pipeline.verify), ("budget", pipeline.budget)]
    for path, part in (*drafters(pipeline), *parts):
        for need in sorted(part.needs - provided):
            yield (
                f"{path}.kind",
                f"{part.section} {part.kind} needs {need!r}, but the parts before it provide"
                f" {', '.join(sorted(provided))}",
            )
        provided |= part.provided


@_rule
def cuda_needs_an_accelerator(context: Context) -> Iterator[Finding]:
    """The device is there, as often as tensor parallelism asks for it."""
    engine, host = context.plan.engine, context.host
    if engine.device != "cuda":
        return
    if not host.has_accelerator:
        yield (
            "engine.device",
            "device is cuda, but this machine shows no accelerator: use cpu or auto,"
            " or check the driver and CUDA_VISIBLE_DEVICES",
        )
    elif host.num_accelerators is not None and engine.tp > host.num_accelerators:
        yield (
            "engine.tp",
            f"tp is {engine.tp}, but {host.num_accelerators} accelerators are visible",
        )


@_rule
def an_attention_backend_runs_on_its_device(context: Context) -> Iterator[Finding]:
    """specstack_cpu is for the CPU; GPU kernels are not."""
    engine = context.plan.engine
    if engine.device == "cuda" and engine.attention_backend == "specstack_cpu":
        yield (
            "engine.attention_backend",
            "specstack_cpu runs on cpu, but the device is cuda: use auto, triton or flashinfer",
        )
    if engine.device == "cpu" and engine.attention_backend in ("triton", "flashinfer", "fa3"):
        yield (
            "engine.attention_backend",
            f"{engine.attention_backend} runs on cuda, but the device is cpu: use auto",
        )


@_rule
def a_cpu_runs_without_graphs(context: Context) -> Iterator[Finding]:
    """The CPU platform captures no graphs; asking for them would be ignored."""
    engine = context.plan.engine
    for name, value in engine.args.items():
        if engine.device == "cpu" and name.startswith("cuda_graph") and value != "disabled":
            yield f"engine.args.{name}", "the device is cpu, which has no CUDA graphs: remove it"


@_rule
def a_verify_step_is_not_captured_without_its_mask(context: Context) -> Iterator[Finding]:
    """The mask is added to whole graphs, of backends whose kernels read it at any width."""
    plan, engine = context.plan, context.plan.engine
    if not plan.speculates or engine.device != "cuda":
        return
    wanted = engine.args.get(DECODE_BACKEND, DISABLED)
    trees = f"drafter {plan.drafter.kind} verifies trees"
    if wanted not in (CAPTURED, DISABLED):
        yield (
            f"engine.args.{DECODE_BACKEND}",
            f"{trees}, whose steps are captured whole, but the value is {wanted}: use {CAPTURED},"
            " or remove it",
        )
    elif wanted == CAPTURED and engine.attention_backend not in GRAPH_BACKENDS:
        yield (
            f"engine.args.{DECODE_BACKEND}",
            f"{trees}, whose mask is captured with engine.attention_backend"
            f" {' or '.join(GRAPH_BACKENDS)}, but it is {engine.attention_backend}: change one",
        )
    # SGLang lets this mapping win over the argument, unseen by the plan.
    config = engine.args.get("cuda_graph_config")
    if isinstance(config, dict) and "backend" in (config.get("decode") or {}):
        yield (
            "engine.args.cuda_graph_config",
            f"{trees}, and its decode.backend overrides the plan's: use"
            f" engine.args.{DECODE_BACKEND}",
        )


@_rule
def a_target_keeps_a_kv_cache_that_trees_can_use(context: Context) -> Iterator[Finding]:
    """Verifying a tree moves keys and values of the accepted path: plain attention only."""
    facts, engine = context.facts, context.plan.engine
    drafts = context.pipeline.speculates
    if facts is None or not (drafts or engine.device == "cpu"):
        return
    name = f"{context.plan.target.model} ({facts.architecture})"
    wanted = f"drafter {context.plan.drafter.kind}" if drafts else "the device cpu"
    advice = "choose another model" + (", or set drafter: none" if engine.device != "cpu" else "")
    if facts.is_recurrent:
        what = "has layers with a recurrent state, which a rejected branch would leave corrupt"
        yield "target.model", f"{name} {what}; {wanted} needs attention in all layers: {advice}"
    elif facts.is_mla:
        what = "keeps latent keys and values (MLA)"
        yield "target.model", f"{name} {what}; {wanted} supports plain KV caches only: {advice}"


@_rule
def drafts_stay_inside_the_attention_window(context: Context) -> Iterator[Finding]:
    """Windowed layers keep a second KV pool, in which accepted paths are not moved."""
    facts, plan = context.facts, context.plan
    if facts is None or facts.sliding_window is None or not context.pipeline.speculates:
        return
    context_length = plan.engine.context_length or facts.max_position_embeddings
    if context_length is None or context_length > facts.sliding_window:
        yield (
            "target.model",
            f"{plan.target.model} has layers that see {facts.sliding_window} tokens, and drafter"
            f" {plan.drafter.kind} needs layers that see all: set engine.context_length to at most"
            f" {facts.sliding_window}, or set drafter: none",
        )


@_rule
def tensor_parallelism_divides_the_heads(context: Context) -> Iterator[Finding]:
    """Every rank gets the same number of query heads, and whole or equally copied KV heads."""
    facts, tp = context.facts, context.plan.engine.tp
    if facts is None:
        return
    if facts.num_heads % tp:
        yield (
            "engine.tp",
            f"tp is {tp}, but the model's {facts.num_heads} heads do not divide by it",
        )
    elif facts.num_kv_heads % tp and tp % facts.num_kv_heads:
        yield (
            "engine.tp",
            f"tp is {tp}, but the model's {facts.num_kv_heads} KV heads neither divide by it"
            " nor divide it",
        )


@_rule
def a_context_fits_the_model(context: Context) -> Iterator[Finding]:
    """Positions beyond what the model was made for give garbage, not an error."""
    facts, length = context.facts, context.plan.engine.context_length
    longest = facts.max_position_embeddings if facts else None
    if length is not None and longest is not None and length > longest:
        yield (
            "engine.context_length",
            f"{length} is beyond the model's {longest} positions: lower it, or change the model's"
            " config with engine.args.json_model_override_args",
        )


@_rule
def a_cpu_has_the_memory(context: Context) -> Iterator[Finding]:
    """Weights, KV cache and the logits of the largest verify step fit the machine."""
    plan, total = context.plan, context.host.memory_bytes
    if plan.engine.device != "cpu" or total is None:
        return
    logits = memory.tree_logits_bytes(plan, context.steps) or 0
    rest = (memory.weights_bytes(plan) or 0) + (memory.kv_pool_bytes(plan) or 0)
    rest += (memory.draft_weights_bytes(plan) or 0) + (memory.draft_kv_pool_bytes(plan) or 0)
    sizes = f"{_gib(total)} of memory"
    if context.pipeline.speculates and logits > total / 4:
        tokens = memory.peak_verify_tokens(plan, context.steps)
        yield (
            "budget",
            f"the logits of a verify step of {tokens} tokens take {_gib(logits)} of {sizes}:"
            " lower the budget or engine.max_running_requests",
        )
    elif rest + logits > total:
        yield (
            "target.model",
            f"weights, KV cache and logits take {_gib(rest + logits)}, but there are {sizes}:"
            " choose a smaller model, or lower engine.max_total_tokens",
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def warnings(context: Context) -> Iterator[str]:
    """Yield what is allowed, but worth knowing."""
    plan, engine = context.plan, context.plan.engine
    model = plan.target.model
    if context.facts is None:
        yield f"the config of {model} is not on this machine: nothing was checked against it"
    yield from head_warnings(context)
    if not (model.startswith(PACKAGED_PREFIX) or is_folder(model)) and Path(model).is_dir():
        yield f"{model} is read as a Hugging Face id; for the folder write ./{model}"
    if engine.device == "cpu" and plan.target.dtype != "float32":
        yield (
            f"target.dtype {plan.target.dtype} on cpu: near-ties may fall differently with and"
            " without drafts, and few CPUs are faster in it; float32 avoids both"
        )
    context_length = engine.context_length or (
        context.facts.max_position_embeddings if context.facts else None
    )
    if context_length and engine.max_total_tokens and engine.max_total_tokens < context_length:
        yield (
            f"the KV cache of {engine.max_total_tokens} tokens is shorter than the context of"
            f" {context_length}: longer requests are refused"
        )
    unreached = len(context.pipeline.budget.steps) - len(context.steps)
    if unreached and context.pipeline.states("engine.max_running_requests"):
        most = engine.max_running_requests
        yield f"the last {unreached} rows of the budget are for more than {most} requests: unused"
    if plan.speculates and engine.attention_backend == "fa3":
        yield "engine.attention_backend fa3 fixes one verify width: prefer triton or flashinfer"
    if plan.speculates and plan.verify.kind == "typical":
        yield "verify typical changes the distribution of what is sampled: not the target's output"
    if engine.device == "cuda" and plan.tree.options.get("cost") is not None:
        yield "tree.cost on cuda: what it leaves out is computed all the same, as padding"
    if plan.graphs:
        yield (
            "captured verify steps have not been run on a GPU: compare the answers with those"
            f" under {DECODE_BACKEND}: {DISABLED}"
        )
    elif plan.speculates and engine.device == "cuda":
        yield "verify steps run without CUDA graphs: SGLang captures them without the tree mask"
    if context.host.accelerator == "amd" and engine.device == "cuda":
        yield "AMD accelerators have not been tested"
