"""What rules emit over trees that were drawn at random follows the target's law.

Exactly on small trees: averaged over every draw and every uniform, continued by plain sampling, the
joint law must be plain sampling's. Statistically on a larger vocabulary. Rules with one mistake
must fail both. And which drafts are verified may not depend on the values drawn.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drawn_law import (
    CHAINS,
    SHAPES,
    Shape,
    batch_of,
    block_borders,
    distance,
    draft_probs,
    rejection_borders,
    sampling_borders,
)
from sampling_law import GREEDY, NO_FILTER, SETTINGS, p_value
from textbook_rules import TextbookBlock, TextbookRejection
from torch.nn.functional import one_hot

from specstack.trees.assemble import assemble_tree
from specstack.types import DraftLaw, DraftTree, NodeLogits, SamplingTensors
from specstack.verify.block import BlockRule
from specstack.verify.greedy import GreedyRule
from specstack.verify.rejection import RejectionRule
from specstack.verify.sample_and_walk import SampleAndWalkRule
from specstack.verify.typical import TypicalRule

MIXED = [SETTINGS["all_filters"], GREEDY, NO_FILTER]
RULES = {
    **{f"rejection-{name}": (RejectionRule(), shape, rejection_borders(), None)
       for name, shape in SHAPES.items()},
    **{f"block-{name}": (BlockRule(), shape, block_borders(), 1)
       for name, shape in CHAINS.items()},
    **{f"sample_and_walk-{name}": (SampleAndWalkRule(), shape, sampling_borders, None)
       for name, shape in SHAPES.items()},
}  # fmt: skip
"""Rule, shape, borders, and how many uniforms count."""


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("rule", "shape", "borders", "levels"), RULES.values(), ids=RULES)
def test_emitted_law_equals_plain_sampling(rule, shape, borders, levels, setting):
    assert distance(rule, shape, [setting], borders, num_levels=levels) < 1e-6


@pytest.mark.parametrize(("rule", "shape", "borders", "levels"), RULES.values(), ids=RULES)
def test_emitted_law_holds_in_mixed_batches(rule, shape, borders, levels):
    assert distance(rule, shape, MIXED, borders, num_levels=levels) < 1e-6


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_rule_emits_the_argmax_path(shape):
    assert distance(GreedyRule(), shape, [GREEDY], sampling_borders) < 1e-12


WRONG = {
    "ratio": (TextbookRejection("ratio"), rejection_borders("ratio"), None),
    "subtract": (TextbookRejection("subtract"), rejection_borders("subtract"), None),
    "renormalise": (TextbookRejection("renormalise"), rejection_borders("renormalise"), None),
    "product": (TextbookBlock("product"), block_borders("product"), 1),
}
SHAPE_OF = {"renormalise": SHAPES["wide"], "product": CHAINS["three"]}


@pytest.mark.parametrize("mistake", WRONG)
def test_exact_law_rejects_wrong_rules(mistake):
    rule, borders, levels = WRONG[mistake]
    shape = SHAPE_OF.get(mistake, SHAPES["pair"])
    assert distance(rule, shape, [NO_FILTER], borders, num_levels=levels) > 1e-2


@pytest.mark.parametrize(
    ("rule", "borders", "levels", "shape"),
    [
        (TextbookRejection(), rejection_borders(), None, SHAPES["wide"]),
        (TextbookBlock(), block_borders(), 1, CHAINS["three"]),
    ],
)
def test_the_wrong_rules_are_right_without_their_mistake(rule, borders, levels, shape):
    assert distance(rule, shape, [NO_FILTER], borders, num_levels=levels) < 1e-6


VOCAB, NUM_DRAWS = 100, 40_000
TREE, CHAIN = Shape(VOCAB, 3, (0, 0, 1, 1, 3)), Shape(VOCAB, 3, (0, 1, 2))


def tables():
    """Target logits and q of the token after each token, [V, V]; q knows 60 tokens of 100."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn((VOCAB, VOCAB), generator=generator)
    near = logits + torch.randn((VOCAB, VOCAB), generator=generator)
    likely = near.topk(60, dim=1)
    return logits, likely.indices, torch.softmax(likely.values / 0.7, dim=1)


def drawn_trees(shape, generator):
    """One draw per request, siblings without replacement by Gumbel noise on log q."""
    logits, candidates, q = tables()
    drafts = torch.zeros((NUM_DRAWS, len(shape.parents) + 1), dtype=torch.int64)
    for parent in sorted(set(shape.parents)):
        children = [i for i, above in enumerate(shape.parents, 1) if above == parent]
        law = q[drafts[:, parent]]
        uniform = torch.rand(law.shape, generator=generator, dtype=torch.float64)
        scores = law.log() - (-uniform.log()).log()
        best = scores.topk(len(children), dim=1).indices
        drafts[:, children] = candidates[drafts[:, parent]].gather(1, best)
    tree = assemble_tree(
        drafts[:, 1:],
        torch.tensor(shape.parents).expand(NUM_DRAWS, -1),
        torch.zeros((NUM_DRAWS, len(shape.parents))),
        drafts[:, 0],
        num_draft_tokens=len(shape.parents) + 1,
        max_depth=shape.depth,
    )
    return replace(tree, law=DraftLaw(candidates[drafts], q[drafts])), NodeLogits(logits, drafts)


def smallest_p_value(rule, shape):
    """Chi-square of the first token, and of the second after each common first one."""
    generator = torch.Generator().manual_seed(1)
    tree, logits = drawn_trees(shape, generator)
    setting = (0.9, 1 << 30, 1.0, 0.02)
    columns = [torch.tensor(x).expand(NUM_DRAWS) for x in setting]
    uniforms = torch.rand((NUM_DRAWS, 4), generator=generator, dtype=torch.float64)
    sampling = SamplingTensors(*columns, uniforms, is_all_greedy=False, use_top_k_top_p=False)
    result = rule.accept(tree, logits, sampling, max_depth=3)
    probs = torch.softmax(logits.values.double() / 0.9, dim=1)
    probs = probs * (probs >= 0.02 * probs.amax(dim=1, keepdim=True))
    probs = probs / probs.sum(dim=1, keepdim=True)
    first = result.emitted[:, 0]
    plain = torch.multinomial(probs[first], 1, generator=generator)[:, 0]
    second = torch.where(result.accept_lens > 1, result.emitted[:, 1], plain)
    common = one_hot(first, VOCAB).sum(dim=0).topk(3).indices.tolist()
    return min(p_value(first, probs[0]), *(p_value(second[first == x], probs[x]) for x in common))


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (RejectionRule(), TREE),
        (RejectionRule(), CHAIN),
        (BlockRule(), CHAIN),
        (SampleAndWalkRule(), TREE),
    ],
    ids=["rejection-tree", "rejection-chain", "block-chain", "sample_and_walk-tree"],
)
def test_chi_square_accepts_the_rules(rule, shape):
    assert smallest_p_value(rule, shape) > 1e-3


@pytest.mark.parametrize("mistake", WRONG)
def test_chi_square_rejects_wrong_rules(mistake):
    rule, _, _ = WRONG[mistake]
    assert smallest_p_value(rule, CHAIN if mistake == "product" else TREE) < 1e-9


DRAWN_RULES = {
    "rejection": (RejectionRule(), rejection_borders(), None),
    "block": (BlockRule(), block_borders(), 1),
}


def pruned(borders, keep):
    """Borders where only the first drafts of each draw are verified."""

    def of(shape, drafts, node, setting):
        num = keep(drafts)
        short = replace(shape, parents=shape.parents[:num])
        return borders(short, drafts[:num], node, setting)

    return of


def unless_unlikely(drafts):
    """Drop the last draft where its own q is small, as `min_survival` would."""
    q = draft_probs(drafts[:-1], 3)
    return len(drafts) - (float(q[drafts[-1]]) < 0.35)


def by_the_parent(drafts):
    """Drop the last draft after some values of the one before it."""
    return len(drafts) - (drafts[-2] == 1)


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_dropping_drafts_for_their_own_value_biases_the_law(name):
    rule, borders, levels = DRAWN_RULES[name]
    for shape in (Shape(3, 1, (0,)), CHAINS["two"]):
        off = distance(
            rule, shape, [NO_FILTER], pruned(borders, unless_unlikely),
            keep=unless_unlikely, num_levels=levels,
        )  # fmt: skip
        assert off > 5e-3


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_dropping_drafts_for_their_parents_value_keeps_the_law(name):
    rule, borders, levels = DRAWN_RULES[name]
    for shape in (CHAINS["two"], CHAINS["three"]):
        off = distance(
            rule, shape, [NO_FILTER], pruned(borders, by_the_parent),
            keep=by_the_parent, num_levels=levels,
        )  # fmt: skip
        assert off < 1e-6


def test_sample_and_walk_does_not_mind_which_drafts_are_dropped():
    for keep in (unless_unlikely, by_the_parent):
        rule = SampleAndWalkRule()
        assert distance(rule, CHAINS["two"], [NO_FILTER], sampling_borders, keep=keep) < 1e-6


@pytest.mark.parametrize(("rule", "shape"), [(RejectionRule(), TREE), (BlockRule(), CHAIN)])
def test_uniforms_beyond_what_was_emitted_do_not_count(rule, shape):
    """They belong to later positions, whose tokens the next round draws with them."""
    generator = torch.Generator().manual_seed(1)
    tree, logits = drawn_trees(shape, generator)
    columns = [torch.tensor(x).expand(NUM_DRAWS) for x in NO_FILTER]
    uniforms = torch.rand((NUM_DRAWS, 4), generator=generator, dtype=torch.float64)
    sampling = SamplingTensors(*columns, uniforms, is_all_greedy=False, use_top_k_top_p=False)
    first = rule.accept(tree, logits, sampling, max_depth=3)
    is_later = torch.arange(4) >= first.accept_lens[:, None]
    others = torch.rand(uniforms.shape, generator=generator, dtype=torch.float64)
    changed = replace(sampling, uniforms=torch.where(is_later, others, uniforms))
    assert torch.equal(rule.accept(tree, logits, changed, max_depth=3).emitted, first.emitted)


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_drafts_that_were_not_drawn_are_refused(name):
    rule, _, _ = DRAWN_RULES[name]
    shape = CHAINS["one"]
    tree, logits = batch_of(shape, [(1,)], len)
    columns = [torch.tensor([x]) for x in NO_FILTER]
    sampling = SamplingTensors(*columns, torch.zeros((1, 2)), is_all_greedy=False)
    with pytest.raises(ValueError, match=f"'{name}' got drafts that were not drawn at random"):
        rule.accept(replace(tree, law=None), logits, sampling, max_depth=1)


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_budget_zero_degenerates_to_plain_decoding(name):
    rule, _, _ = DRAWN_RULES[name]
    logits = NodeLogits(torch.randn((9, 5)), torch.arange(9)[:, None])
    columns = [torch.tensor(x).expand(9) for x in NO_FILTER]
    uniforms = torch.linspace(0, 0.99, 9)[:, None]
    sampling = SamplingTensors(*columns, uniforms, is_all_greedy=False)
    root = DraftTree.root_only(torch.zeros(9, dtype=torch.int64))
    expected = SampleAndWalkRule().accept(root, logits, sampling, max_depth=0)
    found = rule.accept(root, logits, sampling, max_depth=0)
    assert torch.equal(found.emitted, expected.emitted)


def test_typical_acceptance_does_not_follow_the_target():
    rule = TypicalRule(epsilon=0.09, delta=0.3)
    assert distance(rule, SHAPES["wide"], [NO_FILTER], sampling_borders) > 1e-2
    assert distance(rule, SHAPES["wide"], [GREEDY], sampling_borders) < 1e-12


def test_typical_acceptance_at_epsilon_0_takes_the_first_deepest_path():
    tree, logits = batch_of(SHAPES["uneven"], [(0, 1, 0, 1, 0)], len)
    columns = [torch.tensor([x]) for x in SETTINGS["top_k"]]
    sampling = SamplingTensors(*columns, torch.full((1, 4), 0.3), is_all_greedy=False)
    found = TypicalRule(epsilon=0.0, delta=0.3).accept(tree, logits, sampling, max_depth=3)
    assert found.accept_index.tolist() == [[0, 1, 3, 5]]


@pytest.mark.parametrize("setting", [NO_FILTER, SETTINGS["all_filters"]])
def test_typical_acceptance_that_nothing_passes_is_plain_decoding(setting):
    rule = TypicalRule(epsilon=1.1, delta=1e9)
    assert distance(rule, SHAPES["wide"], [setting], sampling_borders) < 1e-6
