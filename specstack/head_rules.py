"""What a plan with trained heads may not contradict: sentences as in `plan_rules`.

A head that is not on this machine is not checked; `plan_rules.warnings` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from specstack.head_facts import drafters
from specstack.models.heads.config import HeadConfig
from specstack_dsl.parts import HeadPart

if TYPE_CHECKING:
    from specstack.plan import HeadPlan
    from specstack.plan_rules import Context

Finding = tuple[str, str]
_SIZES = ("hidden_size", "num_layers", "vocab_size", "num_heads", "num_kv_heads", "head_dim")


def _known(context: Context) -> Iterator[tuple[HeadPlan, HeadConfig]]:
    for head in context.plan.heads:
        if head.config is not None:
            yield head, head.config


def stated(config: HeadConfig) -> dict[str, Any]:
    """What a checkpoint says, by the options that may state it."""
    return {
        "context": config.context.source,
        "draft_vocab": config.draft_vocab_size,
        "mask": config.mask,
        "conditioning": config.conditioning.kind,
        "block_size": config.block_size,
    }


def a_checkpoint_is_what_the_pipeline_says(context: Context) -> Iterator[Finding]:
    """What is stated of a head is there to be relied on."""
    parts = dict(drafters(context.pipeline))
    for head, config in _known(context):
        part = parts[head.place]
        assert isinstance(part, HeadPart)
        for option in part.statements:
            said, found = getattr(part, option), stated(config)[option]
            is_left_out = option == "conditioning" and said == "none"
            if said is not None and said != found and not is_left_out:
                yield (
                    f"{head.place}.{option}",
                    f"the pipeline says {said}, but the head {head.checkpoint} has"
                    f" {'all tokens' if found is None else found}: remove the line, or name"
                    " another head",
                )


def a_head_is_made_for_its_target(context: Context) -> Iterator[Finding]:
    """A head reads the target's layers and shares its tables; their sizes are its own."""
    facts, target = context.facts, context.plan.target.model
    if facts is None:
        return
    for head, config in _known(context):
        differ = [
            f"{name} {getattr(config.target, name)}, not {getattr(facts, name)}"
            for name in _SIZES
            if getattr(config.target, name) != getattr(facts, name)
        ]
        if differ:
            yield (
                f"{head.place}.checkpoint",
                f"the head {head.checkpoint} was made for {config.target.name}, which is not"
                f" {target}: {'; '.join(differ)}",
            )


def a_head_taps_what_the_engine_hands_out(context: Context) -> Iterator[Finding]:
    """SGLang takes a layer's output where the next layer starts, so the last one's is lost."""
    if context.facts is None:
        return
    last = context.facts.num_layers - 1
    for head, config in _known(context):
        if last in config.context.target_layers:
            yield (
                f"{head.place}.checkpoint",
                f"the head {head.checkpoint} reads the output of layer {last}, the last one of"
                f" {context.plan.target.model}, which SGLang does not hand out: train a head on"
                f" layers up to {last - 1}",
            )


def a_tree_is_no_deeper_than_its_block(context: Context) -> Iterator[Finding]:
    """A block has one slot per depth; of a merge one drafter that goes deeper is enough."""
    heads = list(_known(context))
    if len(heads) < len(list(drafters(context.pipeline))):
        return
    if any(config.form != "block" for _, config in heads):
        return
    deepest, depth = (
        max(config.block_size - 1 for _, config in heads),
        context.pipeline.tree.max_depth,
    )
    if depth > deepest:
        names = " and ".join(head.checkpoint for head, _ in heads)
        yield (
            "tree.depth",
            f"the tree is {depth} deep, but the blocks of {names} hold {deepest} drafts behind"
            f" their anchor: set tree.depth to at most {deepest}",
        )


def a_head_gets_whole_kv_heads(context: Context) -> Iterator[Finding]:
    """Ranks gather the KV heads that tensor parallelism splits; repeated ones are in no order."""
    tp = context.plan.engine.tp
    for head, config in _known(context):
        num_heads = config.target.num_kv_heads
        if config.context.source != "hidden" and num_heads % tp:
            yield (
                "engine.tp",
                f"tp is {tp}, but the head {head.checkpoint} reads the target's {num_heads} KV"
                f" heads, which do not divide by it: set tp to a divisor of {num_heads}",
            )


def a_path_conditional_tree_gets_scores_of_paths(context: Context) -> Iterator[Finding]:
    """The marginals of a block say the same of every branch."""
    if "path_scores" not in context.pipeline.tree.needs:
        return
    parts = dict(drafters(context.pipeline))
    for head, config in _known(context):
        is_left_out = getattr(parts[head.place], "conditioning", None) == "none"
        if config.form == "block" and (is_left_out or config.conditioning.kind == "none"):
            why = "leaves it out" if is_left_out else "has none"
            yield (
                "tree.kind",
                f"path_conditional needs a head with a corrector or a refresh pass, but"
                f" {head.checkpoint} {why}: use best_first"
                + (f", or remove {head.place}.conditioning" if is_left_out else ""),
            )


def a_refreshed_tree_is_not_drawn(context: Context) -> Iterator[Finding]:
    """The second pass chooses again, among all tokens."""
    parts = dict(drafters(context.pipeline))
    for head, config in _known(context):
        part = parts[head.place]
        refreshes = config.conditioning.kind == "refresh"
        if (
            refreshes
            and "draft_law" in part.provided
            and getattr(part, "conditioning", 0) != "none"
        ):
            yield (
                f"{head.place}.drafts",
                f"the head {head.checkpoint} scores a tree in a second pass, which drawn drafts"
                f" cannot follow: set {head.place}.conditioning to none, or drafts to best",
            )


HEAD_RULES: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    a_checkpoint_is_what_the_pipeline_says,
    a_head_is_made_for_its_target,
    a_head_taps_what_the_engine_hands_out,
    a_tree_is_no_deeper_than_its_block,
    a_head_gets_whole_kv_heads,
    a_path_conditional_tree_gets_scores_of_paths,
    a_refreshed_tree_is_not_drawn,
)


def head_warnings(context: Context) -> Iterator[str]:
    """Yield what is allowed, but worth knowing."""
    for head in context.plan.heads:
        if head.config is None:
            yield f"the head {head.checkpoint} is not on this machine: nothing was checked"
        elif (
            head.config.form == "autoregressive"
            and context.pipeline.tree.max_depth > head.config.block_size
        ):
            yield (
                f"the head {head.checkpoint} was trained to depth {head.config.block_size}; beyond"
                f" it, up to tree.depth {context.pipeline.tree.max_depth}, it is on its own"
            )
