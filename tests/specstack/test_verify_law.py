"""What the rules emit follows the target's law: exactly on small trees, statistically on large.

Exact: a rule reads one uniform per depth through cumulative distributions, so it is constant on a
grid of cells of the unit cube. Running it once in every cell, weighted by the cell's volume,
integrates over all randomness. The emitted prefix is continued by plain sampling to a fixed
length, and that joint law must equal plain sampling's. Wrong rules must fail both tests.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from sampling_law import (
    GREEDY,
    NO_FILTER,
    SETTINGS,
    complete,
    p_value,
    plain_law,
    plain_probs,
    repeat,
    shared,
    tensors,
)

from specstack.trees.assemble import assemble_tree
from specstack.trees.beam import BeamBuilder
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.trees.expand import ExpandBuilder
from specstack.trees.static import StaticBuilder
from specstack.types import AcceptResult, DraftProposal
from specstack.verify.greedy import GreedyRule
from specstack.verify.sample_and_walk import SampleAndWalkRule
from specstack_kernels.ops import filter_probs, invert_cdf
from specstack_kernels.reference.filter_probs import filter_probs as define_probs
from specstack_kernels.torch_ops.walk import walk_tree

# Paths of the drafts, parents first: (V, depth, paths).
TREES = {
    "root": (3, 0, []),
    "chain": (2, 3, [(1,), (1, 0), (1, 0, 1)]),
    "full": (2, 2, [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]),
    "uneven": (3, 3, [(2,), (0,), (2, 1), (2, 1, 1), (2, 1, 0)]),
    "wide": (4, 2, [(3,), (1,), (3, 0), (3, 2), (1, 1)]),
}


def built_by(builder, budget, vocab=4, depth=2):
    """The paths that a builder takes of all there are, whose log q are random."""
    paths = [
        path for k in range(1, depth + 1) for path in itertools.product(range(vocab), repeat=k)
    ]
    place = {path: i for i, path in enumerate(paths)}
    log_q = torch.randn(len(paths), generator=torch.Generator().manual_seed(0)).sigmoid().log()
    proposal = DraftProposal(
        torch.tensor([[path[-1] for path in paths]]),
        torch.tensor([[place.get(path[:-1], -1) for path in paths]]),
        log_q[None],
    )
    tree = builder.build(proposal, torch.tensor([0]), budget)
    found = [()]
    for node in range(1, int(tree.num_nodes[0])):
        found.append((*found[int(tree.parent_index[0, node])], int(tree.tokens[0, node])))
    return vocab, depth, found[1:]


BUILT = {
    "of chain": built_by(ChainBuilder(2), 2),
    "of static": built_by(StaticBuilder([[0], [1], [0, 0], [1, 0], [0, 1]]), 5),
    "of beam": built_by(BeamBuilder(2, 2), 5),
    "of expand": built_by(ExpandBuilder(2, 2), 5),
    "of best_first": built_by(BestFirstBuilder(2), 5),
    "of a calibrated best_first": built_by(
        BestFirstBuilder(2, 3, {"log_factor": [[[-1.0, -0.1], [-0.3, 0.2]]]}), 5
    ),
    "of a priced best_first": built_by(BestFirstBuilder(2, cost=[(0, 1.0), (8, 2.0)]), 7),
}
TREES |= BUILT


def test_builders_differ():
    """Control: these are trees of several shapes."""
    assert len({tuple(paths) for _, _, paths in BUILT.values()}) >= 4


def make_tree(paths, depth):
    """One DraftTree row with these drafts; the rules must not care about its log q."""
    node_of = {(): 0, **{path: i + 1 for i, path in enumerate(paths)}}
    tokens = torch.tensor([[path[-1] for path in paths]], dtype=torch.int64)
    parents = torch.tensor([[node_of[path[:-1]] for path in paths]], dtype=torch.int64)
    log_q = torch.zeros((1, len(paths))) - torch.arange(len(paths))
    width = {"num_draft_tokens": len(paths) + 1, "max_depth": max(1, depth)}
    return assemble_tree(tokens, parents, log_q, torch.tensor([0]), **width)


class WrongRule:
    """Accepts by a rule that looks plausible; `choose` picks the token at the visited node."""

    def __init__(self, choose):
        self._choose = choose

    def accept(self, tree, logits, sampling, *, max_depth):
        rows = torch.arange(logits.rows.shape[0])
        settings = sampling.filters

        def choose(step, node):
            probs = filter_probs(logits.values[logits.rows[rows, node]], *settings)
            return self._choose(tree, node, probs, sampling.uniforms, step)

        parts = tree.tokens, tree.parent_index, tree.num_nodes
        return AcceptResult(*walk_tree(*parts, choose, max_depth=max_depth))


def trust_the_draft(tree, node, probs, uniforms, step):
    """Take the first child with probability q = 0.5, whatever the target says."""
    child = tree.retrieve_next_token.gather(1, node[:, None])
    token = tree.tokens.gather(1, child.clamp(min=0))[:, 0]
    u = uniforms[:, step]
    takes_child = (child[:, 0] >= 0) & (u < 0.5)
    return torch.where(takes_child, token, invert_cdf(probs, (2 * u) % 1.0))


def reuse_the_uniform(tree, node, probs, uniforms, step):
    return invert_cdf(probs, uniforms[:, 0])


def renormalise_over_children(tree, node, probs, uniforms, step):
    is_child = (tree.parent_index == node[:, None]) & (tree.log_q > -torch.inf)
    allowed = torch.zeros_like(probs).scatter_add(1, tree.tokens, is_child.to(probs.dtype))
    inside = probs * (allowed > 0)
    has_children = inside.sum(dim=1, keepdim=True) > 0
    return invert_cdf(torch.where(has_children, inside, probs), uniforms[:, step])


WRONG_RULES = [
    pytest.param(WrongRule(choose), id=choose.__name__)
    for choose in (trust_the_draft, reuse_the_uniform, renormalise_over_children)
]


def cells(prefixes, vocab, setting, num_uniforms):
    """Midpoints [cells, K] and volumes [cells] of a grid that no decision border crosses."""
    borders = {0.0, 0.5, 1.0}
    for prefix in prefixes:
        borders.update(plain_probs(prefix, vocab, setting)[0].cumsum(0).clamp(max=1).tolist())
    edges = torch.tensor(sorted(borders), dtype=torch.float64)
    centres, widths = ((edges[1:] + edges[:-1]) / 2).tolist(), edges.diff().tolist()
    middle = list(itertools.product(centres, repeat=num_uniforms))
    volume = [math.prod(sides) for sides in itertools.product(widths, repeat=num_uniforms)]
    return torch.tensor(middle, dtype=torch.float64), torch.tensor(volume, dtype=torch.float64)


def emitted_laws(rule, tree_name, settings):
    """Return for each setting the joint law of depth + 1 tokens under `rule`; rows are mixed."""
    vocab, depth, paths = TREES[tree_name]
    prefixes = [(), *paths]
    grids = [cells(prefixes, vocab, setting, depth + 1) for setting in settings]
    size = max(len(volume) for _, volume in grids)
    uniforms = torch.zeros((size, len(settings), depth + 1), dtype=torch.float64)
    for i, (middle, _) in enumerate(grids):
        uniforms[: len(middle), i] = middle
    uniforms = uniforms.reshape(-1, depth + 1)
    rows = uniforms.shape[0]
    logits = torch.stack([plain_probs(prefix, vocab, NO_FILTER)[1] for prefix in prefixes])
    result = rule.accept(
        repeat(make_tree(paths, depth), rows),
        shared(logits, rows),
        tensors(settings, uniforms),
        max_depth=depth,
    )
    laws = []
    for i, (setting, (_, volume)) in enumerate(zip(settings, grids, strict=True)):
        own = slice(i, len(volume) * len(settings), len(settings))
        laws.append(complete(result.emitted[own], result.accept_lens[own], volume, vocab, setting))
    return laws


def distance(rule, tree_name, settings):
    vocab, depth, _ = TREES[tree_name]
    laws = emitted_laws(rule, tree_name, settings)
    plain = [plain_law(vocab, depth + 1, setting) for setting in settings]
    return max(float((a - b).abs().max()) for a, b in zip(laws, plain, strict=True))


@pytest.mark.parametrize("tree_name", TREES)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_emitted_law_equals_plain_sampling(tree_name, setting):
    assert distance(SampleAndWalkRule(), tree_name, [setting]) < 1e-6


@pytest.mark.parametrize("tree_name", TREES)
def test_emitted_law_holds_in_mixed_batches(tree_name):
    settings = [SETTINGS["all_filters"], GREEDY, NO_FILTER]
    assert distance(SampleAndWalkRule(), tree_name, settings) < 1e-6


@pytest.mark.parametrize("tree_name", TREES)
def test_greedy_rule_emits_the_argmax_path(tree_name):
    assert distance(GreedyRule(), tree_name, [GREEDY]) == 0.0


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_exact_law_rejects_wrong_rules(rule):
    assert distance(rule, "uneven", [NO_FILTER]) > 1e-2


def smallest_p_value(rule, num_draws=100_000, vocab=100):
    """Chi-square of the first token and of the second after each accepted first draft."""
    paths = [(3,), (50,), (3, 7), (3, 8), (50, 9), (3, 7, 1)]
    logits = torch.randn((7, vocab), generator=torch.Generator().manual_seed(0))
    logits[0, 3] += 4.0
    logits[0, 50] += 3.5
    logits[1, 7] += 3.0
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand((num_draws, 4), generator=generator, dtype=torch.float64)
    result = rule.accept(
        repeat(make_tree(paths, 3), num_draws),
        shared(logits, num_draws),
        tensors([(0.9, 1 << 30, 0.95, 0.0)], uniforms),
        max_depth=3,
    )
    samples = {0: result.emitted[:, 0]}
    for node in (1, 2):
        samples[node] = result.emitted[result.accept_index[:, 1] == node, 1]
    settings = [torch.tensor([x]) for x in (0.9, 1 << 30, 0.95, 0.0)]
    return min(
        p_value(tokens, define_probs(logits[node : node + 1].double(), *settings)[0])
        for node, tokens in samples.items()
    )


def test_chi_square_accepts_sample_and_walk():
    assert smallest_p_value(SampleAndWalkRule()) > 1e-3


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_chi_square_rejects_wrong_rules(rule):
    assert smallest_p_value(rule) < 1e-9


def test_greedy_rule_refuses_sampled_requests():
    tree = make_tree([(1,)], 1)
    sampling = tensors([NO_FILTER], torch.zeros((1, 2), dtype=torch.float64))
    with pytest.raises(ValueError, match="verify rule 'greedy' got a request with temperature > 0"):
        GreedyRule().accept(tree, shared(torch.zeros((2, 3)), 1), sampling, max_depth=1)
