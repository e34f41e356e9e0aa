"""Drawn drafts: from the law that they bring along, in a shape that nothing drawn decides."""

from __future__ import annotations

import itertools

import pytest
import torch
from head_bench import CASES, REFRESH, Bench
from scipy.stats import chisquare

from specstack.drafters.choice import NUM_CANDIDATES, Best, Drawn
from specstack.drafters.expansion import Children, Frontier, expand
from specstack.drafters.search import make_search
from specstack.models.heads.testing import HIDDEN
from specstack.trees.chain import ChainBuilder
from specstack.trees.static import StaticBuilder
from specstack.types import DraftBatch, Drawing, NodeLogits, SamplingTensors
from specstack.verify.block import BlockRule
from specstack.verify.rejection import RejectionRule
from specstack.verify.sample_and_walk import SampleAndWalkRule

VOCAB, DEPTH = 6, 2
SHAPE = [[0], [1], [0, 0], [0, 1], [1, 0]]


def q_after(path):
    """The draft law behind a path of tokens."""
    seed = 1 + sum((token + 1) * 11**i for i, token in enumerate(path))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(0)


def p_after(path):
    seed = 5000 + sum((token + 1) * 13**i for i, token in enumerate(path))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


class Trie:
    """An expander whose law depends on the path, the same for all requests."""

    def __init__(self, choice, batch):
        self.choice, self.paths = choice, [[()] for _ in range(batch)]

    def first(self):
        return self._children(0)

    def next(self, frontier: Frontier):
        self.paths = [
            [(*paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for paths, parents, tokens in zip(
                self.paths, frontier.parents.tolist(), frontier.tokens.tolist(), strict=True
            )
        ]
        return self._children(frontier.depth)

    def _children(self, depth) -> Children:
        log_q = torch.stack([torch.stack([q_after(p) for p in paths]) for paths in self.paths])
        return self.choice.of_logits(log_q, None, depth)


def a_batch(size, *, temperature=1.0, greedy=False, seed=0, seq_len=9):
    seeds = torch.arange(size) + 1000 * seed
    drawing = Drawing(torch.full((size,), temperature), torch.full((size,), greedy), seeds)
    lens = torch.full((size,), seq_len)
    none = torch.zeros(size, 0, dtype=torch.int64)
    return DraftBatch(tuple(range(size)), torch.zeros(size).long(), lens, none, drawing)


def a_proposal(batch, search, budget, width):
    return expand(Trie(Drawn.of(batch, width), len(batch.slots)), search, DEPTH, budget)


def p_value(counts, expected):
    """Of counts against probabilities."""
    expected = expected.double()
    return chisquare(counts.double(), expected / expected.sum() * counts.sum()).pvalue


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_siblings_are_drawn_from_the_law_without_replacement(temperature):
    size = 20_000
    drawn = Drawn.of(a_batch(size, temperature=temperature), 2)
    children = drawn.of_logits(q_after(()).expand(size, 1, -1), None, 0)
    q = (q_after(()) / temperature).softmax(0)
    pairs = torch.zeros(VOCAB, VOCAB)
    for first, second in itertools.permutations(range(VOCAB), 2):
        pairs[first, second] = q[first] * q[second] / (1 - q[first])
    found = torch.bincount((children.tokens[:, 0] * torch.tensor([VOCAB, 1])).sum(1), minlength=36)
    seen = pairs.flatten() > 0
    assert found[~seen].sum() == 0
    assert p_value(found[seen], pairs.flatten()[seen]) > 1e-3
    wrong = (q[:, None] * q).fill_diagonal_(0).flatten()  # with replacement
    assert p_value(found[seen], wrong[seen]) < 1e-6
    law = children.law
    assert torch.allclose(law.probs.sum(-1), torch.ones(size, 1), atol=1e-6)
    assert torch.allclose(law.probs[0, 0], q[law.tokens[0, 0]], atol=1e-6)
    torch.testing.assert_close(
        children.log_q.exp()[:, 0, 0], q[children.tokens[:, 0, 0]], atol=1e-6, rtol=1e-5
    )


def test_draws_of_depths_rounds_and_requests_differ_and_repeat_with_their_seeds():
    log_q = torch.zeros(1, 1, 50)

    def draw(depth=0, **batch):
        drawn = Drawn.of(a_batch(1, **batch), 6)
        return drawn.of_logits(log_q, None, depth).tokens.flatten().tolist()

    one = draw()
    assert one == draw()
    others = [draw(depth=1), draw(seq_len=10), draw(seed=1), draw(depth=1, seq_len=10)]
    assert len({tuple(one), *map(tuple, others)}) == 5


def test_all_depths_at_once_draw_what_one_after_the_other_draws():
    drawn = Drawn.of(a_batch(3), 4)
    log_q = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    both = drawn.of_logits(log_q, None, torch.arange(2))
    for depth in range(2):
        one = drawn.of_logits(log_q[:, depth, None], None, depth)
        assert torch.equal(one.tokens[:, 0], both.tokens[:, depth])


def test_a_law_has_bounded_candidates_and_names_target_tokens():
    ids = torch.arange(200) * 3
    log_q = torch.randn(2, 1, 200, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    children = Drawn.of(a_batch(2), 3).of_logits(log_q, ids, 0)
    assert children.law.tokens.shape == (2, 1, NUM_CANDIDATES)
    assert (children.law.tokens % 3 == 0).all()
    best = set((3 * log_q[0, 0].topk(NUM_CANDIDATES).indices).tolist())
    assert set(children.law.tokens[0, 0].tolist()) == best
    assert set(children.tokens[0, 0].tolist()) <= best


def test_greedy_requests_get_the_most_probable_drafts():
    log_q = torch.randn(4, 1, 30, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    drawn = Drawn.of(a_batch(4, greedy=True), 5).of_logits(log_q, None, 0)
    assert torch.equal(drawn.tokens, Best(5).of_logits(log_q, None, 0).tokens)
    assert not torch.equal(Drawn.of(a_batch(4), 5).of_logits(log_q, None, 0).tokens, drawn.tokens)


def test_where_a_law_runs_out_of_tokens_there_is_no_draft():
    log_q = torch.tensor([[[0.0, -900.0, -torch.inf]]])
    children = Drawn.of(a_batch(1), 3).of_logits(log_q, None, 0)
    assert children.tokens[0, 0, 0] == 0
    assert children.log_q[0, 0].tolist() == [0.0, -torch.inf, -torch.inf]


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"width": 3}, "drawn drafts need a search of fixed shape"),
        ({}, "drawn drafts need a search of fixed shape"),
        ({"width": 2, "families": True}, "drawn drafts need a search of fixed shape"),
        ({"width": 1, "paths": [[0]]}, "a shape has its own width"),
    ],
)
def test_a_drafter_refuses_to_choose_among_drawn_drafts(search, message, tmp_path):
    """The second lock behind the language's rules: the law would be another."""
    with pytest.raises(ValueError, match=message):
        Bench("block", tmp_path, search=search, drafts="drawn")


def test_a_second_pass_refuses_drawn_drafts(tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "refresh", ("block", HIDDEN, REFRESH))
    with pytest.raises(ValueError, match="a second pass chooses drafts again"):
        Bench("refresh", tmp_path, search={"width": 1}, drafts="drawn")
    Bench("refresh", tmp_path, search={"width": 1}, drafts="drawn", conditioned=False)


@pytest.mark.parametrize("budget", [1, 3, 5])
def test_a_shape_is_filled_whatever_is_drawn(budget):
    batch = a_batch(50)
    search = make_search(paths=SHAPE)
    proposal = a_proposal(batch, search, budget, search.width(budget))
    tree = StaticBuilder(SHAPE).build(proposal, batch.bonus_tokens, budget)
    assert (tree.num_nodes == budget + 1).all()
    assert (tree.parent_index == tree.parent_index[0]).all()
    for b in range(3):
        paths = [()]
        for node in range(1, budget + 1):
            above = paths[int(tree.parent_index[b, node])]
            token = int(tree.tokens[b, node])
            parent = int(tree.parent_index[b, node])
            law = dict(zip(tree.law.tokens[b, parent].tolist(), tree.law.probs[b, parent].tolist(),
                           strict=True))  # fmt: skip
            assert law[token] == pytest.approx(float(q_after(above)[token].exp()), abs=1e-6)
            paths.append((*above, token))


def emitted(rule, tree, size, seed=3):
    """What the rule emits over target logits that depend on the path."""
    rows = []
    for b in range(size):
        paths = [()]
        for node in range(1, tree.num_draft_tokens):
            paths.append((*paths[int(tree.parent_index[b, node])], int(tree.tokens[b, node])))
        rows.append(torch.stack([p_after(path) for path in paths]))
    values = torch.stack(rows).flatten(0, 1)
    index = torch.arange(len(values)).view(size, -1)
    ones = torch.ones(size)
    uniforms = torch.rand(
        size, DEPTH + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    sampling = SamplingTensors(
        ones, ones.long() * 2**30, ones, ones * 0, uniforms, is_all_greedy=False,
        use_top_k_top_p=False,
    )  # fmt: skip
    return rule.accept(tree, NodeLogits(values, index), sampling, max_depth=DEPTH)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("chain", RejectionRule()),
        ("tree", RejectionRule()),
        ("chain", BlockRule()),
        ("tree", SampleAndWalkRule()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_emitted_follows_the_target_and_best_drafts_would_not(kind, rule):
    """From the drafter's draws to the rule, nothing but the seeds shared."""
    size = 6000
    batch = a_batch(size)
    search = make_search(paths=SHAPE) if kind == "tree" else make_search(width=1)
    builder = StaticBuilder(SHAPE) if kind == "tree" else ChainBuilder(DEPTH)
    budget = 5 if kind == "tree" else DEPTH
    proposal = a_proposal(batch, search, budget, search.width(budget))
    found = emitted(rule, builder.build(proposal, batch.bonus_tokens, budget), size)
    first = torch.bincount(found.emitted[:, 0], minlength=VOCAB)
    assert p_value(first, p_after(()).softmax(0)) > 1e-3
    token = int(first.argmax())
    second = found.emitted[(found.emitted[:, 0] == token) & (found.accept_lens > 1), 1]
    counts = torch.bincount(second, minlength=VOCAB)
    assert p_value(counts, p_after((token,)).softmax(0)) > 1e-3
    if isinstance(rule, SampleAndWalkRule):
        return  # it asks nothing of the drafts
    greedy = a_batch(size, greedy=True)
    best = a_proposal(greedy, search, budget, search.width(budget))
    wrong = emitted(rule, builder.build(best, batch.bonus_tokens, budget), size)
    assert (
        p_value(torch.bincount(wrong.emitted[:, 0], minlength=VOCAB), p_after(()).softmax(0)) < 1e-6
    )
