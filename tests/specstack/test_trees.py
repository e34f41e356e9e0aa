"""Tree builders: the right nodes, in an order and a form that every consumer may rely on."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.types import DraftProposal
from specstack_kernels.reference.link_tree import link_tree

VOCAB = 50


def random_proposal(batch, num_candidates, seed, *, coarse=False):
    """Random tries; `coarse` draws log q from {-1, 0}, so that most paths tie."""
    rng = random.Random(seed)
    tokens = torch.zeros((batch, num_candidates), dtype=torch.int64)
    parents = torch.full((batch, num_candidates), -1, dtype=torch.int64)
    log_q = torch.full((batch, num_candidates), -torch.inf)
    for b in range(batch):
        for m in range(rng.randint(0, num_candidates)):
            tokens[b, m] = 100 * b + m  # distinct among siblings
            parents[b, m] = rng.randint(-1, m - 1)
            log_q[b, m] = rng.choice([0.0, -1.0]) if coarse else -rng.random()
    return DraftProposal(tokens, parents, log_q)


def candidate_paths(proposal, b):
    """Return {candidate: (path as candidates, cumulative log q)} of one row."""
    paths = {}
    for m in range(proposal.tokens.shape[1]):
        if proposal.log_q[b, m] == -torch.inf:
            continue
        parent = int(proposal.parent_index[b, m])
        above, cost = paths[parent] if parent >= 0 else ((), 0.0)
        paths[m] = ((*above, m), cost + float(proposal.log_q[b, m]))
    return paths


def check_form(tree, bonus_tokens):
    """Check what types.py promises for any tree."""
    nodes = tree.num_draft_tokens
    assert torch.equal(tree.tokens[:, 0], bonus_tokens)
    assert (tree.parent_index[:, 0] == -1).all()
    assert (tree.log_q[:, 0] == 0).all()
    is_dead = torch.arange(nodes) >= tree.num_nodes[:, None]
    assert ((tree.log_q == -torch.inf) == is_dead).all()
    assert (tree.parent_index[is_dead] == 0).all()
    assert (tree.depth[is_dead] == 1).all()
    assert (tree.parent_index < torch.arange(nodes)).all()
    assert (tree.log_q.diff(dim=1)[~is_dead[:, 1:]] <= 0).all()
    linked = link_tree(tree.parent_index, tree.num_nodes, max_depth=nodes)
    assert torch.equal(tree.depth, linked.depth)
    assert torch.equal(tree.tree_mask, linked.tree_mask)
    assert torch.equal(tree.retrieve_next_token, linked.retrieve_next_token)
    assert torch.equal(tree.retrieve_next_sibling, linked.retrieve_next_sibling)


def tree_paths(tree, b):
    """Return the token paths of the live drafts of one row, in node order."""
    paths = [()]
    for node in range(1, int(tree.num_nodes[b])):
        above = paths[int(tree.parent_index[b, node])]
        paths.append((*above, int(tree.tokens[b, node])))
    return paths[1:]


cases = st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(0, 12), st.integers(0, 10**6))


@given(cases, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 3)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_builders_keep_the_form(case, depth, width, coarse):
    batch, num_candidates, budget, seed = case
    proposal = random_proposal(batch, num_candidates, seed, coarse=coarse)
    bonus = torch.arange(batch) + 7
    for builder in (BestFirstBuilder(depth, width), ChainBuilder(depth)):
        tree = builder.build(proposal, bonus, budget)
        assert tree.num_draft_tokens == budget + 1
        check_form(tree, bonus)
        assert (tree.depth <= depth).all()
        needed = int(tree.num_nodes.max())
        check_form(tree.narrow(needed), bonus)
        if width is not None:
            children = torch.nn.functional.one_hot(tree.parent_index + 1, budget + 2)
            live = torch.arange(budget + 1) < tree.num_nodes[:, None]
            drafts = children[:, 1:] * live[:, 1:, None]
            assert drafts.sum(dim=1).max() <= width or isinstance(builder, ChainBuilder)


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 10**6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_best_first_maximises_expected_acceptance(num_candidates, budget, seed, coarse):
    proposal = random_proposal(1, num_candidates, seed, coarse=coarse)
    paths = candidate_paths(proposal, 0)
    tree = BestFirstBuilder(depth=9).build(proposal, torch.tensor([0]), budget)
    size = min(budget, len(paths))
    best = max(
        sum(2.718281828459045 ** paths[m][1] for m in chosen)
        for chosen in itertools.combinations(paths, size)
        if all(set(paths[m][0]) <= set(chosen) for m in chosen)
    )
    assert int(tree.num_nodes[0]) == size + 1
    assert float(tree.log_q[0, 1:].exp().sum()) == pytest.approx(best, abs=1e-5)


@given(cases, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_best_first_takes_candidates_by_path_probability(case, depth):
    batch, num_candidates, budget, seed = case
    proposal = random_proposal(batch, num_candidates, seed)
    tree = BestFirstBuilder(depth).build(proposal, torch.zeros(batch, dtype=torch.int64), budget)
    for b in range(batch):
        paths = [p for p in candidate_paths(proposal, b).values() if len(p[0]) <= depth]
        paths.sort(key=lambda p: -p[1])
        expected = [tuple(100 * b + m for m in path) for path, _ in paths[:budget]]
        assert tree_paths(tree, b) == expected


@given(cases, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_chain_follows_the_most_probable_child(case, depth):
    batch, num_candidates, budget, seed = case
    proposal = random_proposal(batch, num_candidates, seed)
    tree = ChainBuilder(depth).build(proposal, torch.zeros(batch, dtype=torch.int64), budget)
    for b in range(batch):
        expected, node = [], -1
        while len(expected) < min(depth, budget):
            children = [
                m
                for m in range(num_candidates)
                if int(proposal.parent_index[b, m]) == node and proposal.log_q[b, m] > -torch.inf
            ]
            if not children:
                break
            node = max(children, key=lambda m: float(proposal.log_q[b, m]))
            expected.append(100 * b + node)
        assert [path[-1] for path in tree_paths(tree, b)] == expected


def test_rounding_never_puts_a_child_above_its_parent():
    """Tiny conditional log q: their sums round, but monotonically."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        log_q = -torch.rand((1, 12), generator=generator) * 1e-7
        log_q[0, 0] = -1.0
        chain = DraftProposal(torch.arange(12)[None], torch.arange(-1, 11)[None], log_q)
        tree = BestFirstBuilder(12).build(chain, torch.tensor([0]), 12)
        assert tree.parent_index.tolist() == [list(range(-1, 12))]


def test_dropping_a_sibling_drops_its_subtree():
    proposal = DraftProposal(
        tokens=torch.tensor([[1, 2, 3]]),
        parent_index=torch.tensor([[-1, -1, 1]]),
        log_q=torch.tensor([[-0.1, -0.2, 0.0]]),
    )
    tree = BestFirstBuilder(depth=4, width=1).build(proposal, torch.tensor([0]), 3)
    assert tree_paths(tree, 0) == [(1,)]


@pytest.mark.parametrize("builder", [BestFirstBuilder(4), BestFirstBuilder(4, 2), ChainBuilder(4)])
@pytest.mark.parametrize("budget", [0, 3])
def test_no_candidates_give_a_lone_root(builder, budget):
    empty = DraftProposal(
        torch.zeros((2, 0), dtype=torch.int64),
        torch.zeros((2, 0), dtype=torch.int64),
        torch.zeros((2, 0)),
    )
    bonus = torch.tensor([5, 6])
    tree = builder.build(empty, bonus, budget)
    assert tree.num_draft_tokens == budget + 1
    assert tree.num_nodes.tolist() == [1, 1]
    check_form(tree, bonus)


@pytest.mark.parametrize("make", [lambda: BestFirstBuilder(0), lambda: BestFirstBuilder(2, 0)])
def test_best_first_refuses_empty_limits(make):
    with pytest.raises(ValueError, match="depth and width must be at least 1"):
        make()


def test_chain_refuses_an_empty_limit():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        ChainBuilder(0)


@given(st.integers(0, 12), st.integers(0, 10), st.floats(0.0, 0.99), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_min_survival_cuts_the_unlikely_end_of_the_row(num_candidates, budget, price, seed):
    proposal = random_proposal(3, num_candidates, seed)
    bonus = torch.zeros(3, dtype=torch.int64)
    floor = math.log(price) if price else -math.inf
    for builder in (BestFirstBuilder(4), ChainBuilder(4)):
        full = builder.build(proposal, bonus, budget)
        cut = builder.build(proposal, bonus, budget, price)
        check_form(cut, bonus)
        for b, kept in enumerate(cut.num_nodes.tolist()):
            live = full.log_q[b, : int(full.num_nodes[b])]
            assert kept == int((live >= floor).sum())
            assert torch.equal(cut.tokens[b, :kept], full.tokens[b, :kept])
            assert torch.equal(cut.tree_mask[b, :kept, :kept], full.tree_mask[b, :kept, :kept])
