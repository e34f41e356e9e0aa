"""Cross-part rules: one small function each, named after the sentence that it enforces.

A rule reads sections of a pipeline and yields (path, message). It runs when the sections it reads
are sound, so that one mistake does not hide another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specstack_dsl.engine_args import (
    ALWAYS_SET,
    OWNED,
    REFUSED_WITH_DRAFTS,
    SPECULATION_PREFIXES,
    turns_on,
)
from specstack_dsl.errors import Problem, did_you_mean
from specstack_dsl.parts.head import HeadPart
from specstack_dsl.sections import Pipeline
from specstack_dsl.sglang_args import frozen

Finding = tuple[str, str]
Check = Callable[[Pipeline], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A check and the sections that it reads."""

    check: Check
    sections: frozenset[str]

    @property
    def name(self) -> str:
        """The sentence."""
        return self.check.__name__


RULES: list[Rule] = []


def rule(*sections: str) -> Callable[[Check], Check]:
    """Register a check over these sections."""

    def register(check: Check) -> Check:
        RULES.append(Rule(check, frozenset(sections)))
        return check

    return register


def broken_rules(pipeline: Pipeline, sound: frozenset[str]) -> Iterator[Problem]:
    """Yield what breaks a rule, over the sections that are sound by themselves."""
    for one in RULES:
        if one.sections <= sound:
            for path, message in one.check(pipeline):
                yield Problem(path, message, pipeline.position(path), one.name)


@rule("tree", "budget")
def a_budget_fits_the_nodes_of_its_tree(pipeline: Pipeline) -> Iterator[Finding]:
    """A budget beyond what depth and width can give would be paid for and never used."""
    most = pipeline.tree.max_nodes
    if most is None:
        return
    tree = pipeline.tree.kind
    options = ("depth", "width", "paths")
    shape = [f"tree.{name}" for name in options if name in pipeline.tree.options]
    for index, (_, budget) in enumerate(pipeline.budget.steps):
        places = (f"budget.rows.{index}.draft_budget", "budget.choices", "budget.draft_budget")
        if budget > most:
            yield (
                next(filter(pipeline.states, places), places[-1]),
                f"{budget} drafts do not fit tree {tree}, which has at most {most} here:"
                f" lower it, or {'add to' if 'tree.paths' in shape else 'raise'}"
                f" {' or '.join(shape)}",
            )


@rule("drafter", "tree", "budget")
def no_drafter_needs_budget_zero_or_no_tree(pipeline: Pipeline) -> Iterator[Finding]:
    """Without a drafter there is nothing to build trees of, or to spend a budget on."""
    if pipeline.speculates:
        return
    if any(budget > 0 for _, budget in pipeline.budget.steps):
        yield (
            "budget",
            "drafter none proposes nothing to verify: remove the section, or set draft_budget to 0",
        )
    elif pipeline.states("tree") and not pipeline.states("budget"):
        yield (
            "tree",
            "drafter none proposes nothing to build a tree of: remove the section, or state"
            " `budget: {kind: fixed, draft_budget: 0}`",
        )


@rule("drafter", "engine")
def drafts_need_a_backend_that_reads_tree_masks(pipeline: Pipeline) -> Iterator[Finding]:
    """torch_native ignores masks: whole trees, and pages, would be verified as one chain."""
    if pipeline.speculates and pipeline.engine.attention_backend == "torch_native":
        yield (
            "engine.attention_backend",
            "torch_native cannot verify drafts, at any page_size: it ignores tree masks;"
            " use specstack_cpu on cpu, triton, flashinfer or fa3 on cuda",
        )


@rule("engine")
def engine_args_are_arguments_of_sglang(pipeline: Pipeline) -> Iterator[Finding]:
    """SGLang exits at an argument that it does not know."""
    version, names = frozen()
    for name in pipeline.engine.args:
        if name not in names:
            plain = name.lstrip("-").replace("-", "_")
            hint = f"; write {plain!r}" if plain in names else did_you_mean(name, names)
            yield f"engine.args.{name}", f"not an argument of SGLang {version}{hint}"


@rule("engine")
def engine_args_leave_what_the_pipeline_states(pipeline: Pipeline) -> Iterator[Finding]:
    """One home per value: what the language sets is not set again by name."""
    for name in pipeline.engine.args:
        path = f"engine.args.{name}"
        if name in OWNED:
            yield path, f"set {OWNED[name]} instead"
        elif name in ALWAYS_SET:
            yield path, f"remove it: {ALWAYS_SET[name]}"
        elif name.startswith(SPECULATION_PREFIXES):
            yield path, "remove it: drafting is described by drafter, tree, verify and budget"


@rule("drafter", "engine")
def engine_args_keep_to_what_drafting_supports(pipeline: Pipeline) -> Iterator[Finding]:
    """A feature that drafting excludes is refused with the reason, not found out at run time."""
    if not pipeline.speculates:
        return
    for name, value in pipeline.engine.args.items():
        refusal = REFUSED_WITH_DRAFTS.get(name)
        if refusal and turns_on(name, value):
            yield (
                f"engine.args.{name}",
                f"{refusal.feature} does not work with a drafter: {refusal.reason};"
                f" {refusal.instead}, or set drafter: none",
            )


@rule("drafter", "tree")
def drawn_drafts_stand_in_a_tree_of_fixed_shape(pipeline: Pipeline) -> Iterator[Finding]:
    """Choosing among drafts by what was drawn would spoil the law that p is divided by."""
    for index, member in enumerate(pipeline.drafter.members or ()):
        if "draft_law" in member.provided:
            yield (
                f"drafter.of.{index}.drafts",
                "the drafts of a merge are chosen among those of several drafters, which drawn ones"
                " cannot be: set drafts to best",
            )
    tree = pipeline.tree
    if "draft_law" in pipeline.drafter.provided and "fixed_shape" not in tree.provides:
        yield (
            "drafter.drafts",
            f"drawn drafts are verified whatever was drawn, but tree {tree.kind} chooses the most"
            " probable: use tree chain or static, or set drafts to best",
        )


@rule("drafter", "tree")
def drawn_drafts_are_all_verified(pipeline: Pipeline) -> Iterator[Finding]:
    """A stop that looks at the drafts' own probabilities spoils the law as well."""
    if "draft_law" not in pipeline.drafter.provided:
        return
    for option in ("calibration", "cost"):
        if pipeline.tree.options.get(option) is not None:
            yield (
                f"tree.{option}",
                f"{option} would choose among drawn drafts by what was drawn: remove it, or set"
                " drafter.drafts to best",
            )


@rule("drafter", "budget")
def drawn_drafts_are_verified_at_any_survival(pipeline: Pipeline) -> Iterator[Finding]:
    """Non-anticipation: whether a draft is verified may not depend on the value drawn."""
    if "draft_law" not in pipeline.drafter.provided:
        return
    stated: dict[str, Any] = {}
    for place, part in (("budget", pipeline.budget), ("budget.shadow", pipeline.budget.shadow)):
        options = {} if part is None else part.options
        rows = {f"{place}.rows.{index}": row for index, row in enumerate(options.get("rows", ()))}
        stated |= rows or {place: options}
    for path, row in stated.items():
        if row.get("min_survival", 0) > 0:
            yield (
                f"{path}.min_survival",
                "would drop drawn drafts for what was drawn, which biases the output: set it to 0,"
                " or use drafter.drafts best and verify sample_and_walk",
            )


@rule("drafter", "budget")
def drawn_drafts_have_no_price(pipeline: Pipeline) -> Iterator[Finding]:
    """A price drops drafts for what was drawn, whoever sets it."""
    if "draft_law" not in pipeline.drafter.provided:
        return
    budget = pipeline.budget
    for path, part in (("budget", budget), ("budget.shadow", budget.shadow)):
        if part is not None and part.prices_drafts:
            yield (
                f"{path}.prices",
                f"{part.kind} would drop drawn drafts by their price, which biases the output:"
                f" set {path}.prices to false, or use drafter.drafts best",
            )


@rule("budget")
def a_shadow_stays_within_the_acting_budget(pipeline: Pipeline) -> Iterator[Finding]:
    """What is never offered has no survivals: nothing would be known about larger budgets."""
    shadow = pipeline.budget.shadow
    if shadow is None:
        return
    most, asked = max(pipeline.budget.draft_budgets), max(shadow.draft_budgets)
    if asked > most:
        yield (
            "budget.shadow",
            f"{shadow.kind} may choose {asked} drafts, but {pipeline.budget.kind} never more than"
            f" {most}: lower it, or raise the acting budget",
        )


@rule("budget")
def policies_share_one_cost_table(pipeline: Pipeline) -> Iterator[Finding]:
    """An engine has one; two would make the comparison one of tables."""
    shadow = pipeline.budget.shadow
    acting = getattr(pipeline.budget, "costs", None)
    watching = getattr(shadow, "costs", None)
    if None not in (acting, watching) and acting != watching:
        yield (
            "budget.shadow.costs",
            f"{watching!r}, but budget.costs is {acting!r}: name the same file for both",
        )


@rule("drafter", "tree")
def limits_of_a_search_are_for_heads(pipeline: Pipeline) -> Iterator[Finding]:
    """What nobody reads would be ignored."""
    members = pipeline.drafter.members
    heads = [
        ("drafter" if members is None else f"drafter.of.{index}", part)
        for index, part in enumerate(members or (pipeline.drafter,))
        if isinstance(part, HeadPart)
    ]
    if "paths" in pipeline.tree.search:
        for place, head in heads:
            if head.width is not None:
                yield f"{place}.width", "tree static has a width of its own: remove the line"
    if getattr(pipeline.tree, "frontier", None) is not None and not heads:
        yield (
            "tree.frontier",
            f"it bounds what a head scores, and drafter {pipeline.drafter.kind} has none:"
            " remove the line",
        )
