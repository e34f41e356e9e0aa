"""Tree builders: the right nodes, in an order and a form that every consumer may rely on."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.trees.beam import BeamBuilder
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.calibration import Calibration
from specstack.trees.chain import ChainBuilder
from specstack.trees.cost import RoundCost
from specstack.trees.expand import ExpandBuilder
from specstack.trees.static import StaticBuilder
from specstack.trees.tries import depths, on_spine, sibling_ranks
from specstack.types import DraftLaw, DraftProposal
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


def families(proposal, b):
    """Return {candidate or -1: its children, best first} of one row."""
    children = {-1: []}
    for m in candidate_paths(proposal, b):
        children.setdefault(int(proposal.parent_index[b, m]), []).append(m)
    for family in children.values():
        family.sort(key=lambda m: -float(proposal.log_q[b, m]))
    return children


def ranked_path(proposal, b, m):
    """Return a candidate's path as ranks among siblings."""
    children, ranks = families(proposal, b), []
    while m >= 0:
        parent = int(proposal.parent_index[b, m])
        ranks.append(children[parent].index(m))
        m = parent
    return tuple(reversed(ranks))


def random_shape(seed, num_nodes):
    """Paths of ranks, parents first."""
    rng, paths = random.Random(seed), [()]
    for _ in range(num_nodes):
        above = rng.choice(paths)
        siblings = sum(path[:-1] == above for path in paths[1:])
        paths.append((*above, siblings))
    return paths[1:]


cases = st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(0, 12), st.integers(0, 10**6))


@given(cases, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 3)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_builders_keep_the_form(case, depth, width, coarse):
    batch, num_candidates, budget, seed = case
    proposal = random_proposal(batch, num_candidates, seed, coarse=coarse)
    bonus = torch.arange(batch) + 7
    builders = [BestFirstBuilder(depth, width), ChainBuilder(depth), BeamBuilder(depth, width or 3)]
    builders += [ExpandBuilder(depth, width or 3)]
    for builder in builders:
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
            assert drafts.sum(dim=1).max() <= width


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


@pytest.mark.parametrize(
    "builder",
    [
        BestFirstBuilder(4),
        BestFirstBuilder(4, 2),
        ChainBuilder(4),
        BeamBuilder(4, 2),
        ExpandBuilder(4, 2),
        StaticBuilder([[0], [1]]),
        BestFirstBuilder(4, calibration={"log_factor": [[[-0.1, 0.1]]]}, cost=[(0, 1.0), (4, 2.0)]),
    ],
    ids=lambda builder: type(builder).__name__,
)
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ChainBuilder(0), "depth must be at least 1, got 0"),
        (lambda: BestFirstBuilder(2, 0), "width must be at least 1, got 0"),
        (lambda: StaticBuilder([[0, 1], [0]]), "paths must be distinct and name parents"),
        (lambda: StaticBuilder([[0], [0]]), "paths must be distinct and name parents"),
        (lambda: StaticBuilder([[1]]), "paths must be distinct and name parents"),
        (lambda: RoundCost([(0, 1.0)]), "cost must be at least two points"),
        (lambda: RoundCost([(1, 1.0), (2, 2.0)]), "drafts rising from 0 on"),
        (lambda: RoundCost([(0, 30.0), (5, 20.0)]), "positive and not falling"),
        (lambda: Calibration([[0.0]]), r"log_factor must be \[depths\]\[ranks\]\[2\]"),
    ],
)
def test_builders_refuse_what_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def drafts_of(tree, b):
    return {int(token) for token in tree.tokens[b, 1 : int(tree.num_nodes[b])]}


@given(cases, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_expand_is_algorithm_1(case, depth, width):
    """Pop the best node, append its best `width` children, until the budget is spent."""
    batch, num_candidates, budget, seed = case
    proposal = random_proposal(batch, num_candidates, seed)
    tree = ExpandBuilder(depth, width).build(proposal, torch.zeros(batch).long(), budget)
    for b in range(batch):
        paths, children = candidate_paths(proposal, b), families(proposal, b)
        score = {-1: 0.0, **{m: cost for m, (_, cost) in paths.items()}}
        waiting, taken = [-1], []
        while waiting and len(taken) < budget:
            best = max(waiting, key=score.__getitem__)
            waiting.remove(best)
            if best >= 0 and len(paths[best][0]) == depth:
                continue
            family = children.get(best, [])[:width]
            taken += family
            waiting += family
        assert drafts_of(tree, b) == {100 * b + m for m in taken[:budget]}


@given(cases, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_beam_expands_the_best_of_each_depth(case, depth, width):
    batch, num_candidates, budget, seed = case
    proposal = random_proposal(batch, num_candidates, seed)
    tree = BeamBuilder(depth, width).build(proposal, torch.zeros(batch).long(), budget)
    for b in range(batch):
        paths, children = candidate_paths(proposal, b), families(proposal, b)
        beam, found = [-1], []
        for _ in range(depth):
            level = [m for node in beam for m in children.get(node, [])[:width]]
            found += level
            beam = sorted(level, key=lambda m: -paths[m][1])[:width]
        best = sorted(found, key=lambda m: -paths[m][1])[:budget]
        assert drafts_of(tree, b) == {100 * b + m for m in best}


@given(cases, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_static_takes_the_first_paths_of_its_shape(case, num_nodes):
    batch, num_candidates, budget, seed = case
    proposal = random_proposal(batch, num_candidates, seed)
    shape = random_shape(seed, num_nodes)
    tree = StaticBuilder(shape).build(proposal, torch.zeros(batch).long(), budget)
    check_form(tree, torch.zeros(batch).long())
    for b in range(batch):
        wanted = shape[:budget]
        found = [m for m in candidate_paths(proposal, b) if ranked_path(proposal, b, m) in wanted]
        assert drafts_of(tree, b) == {100 * b + m for m in found}


@given(cases)
@settings(max_examples=100, deadline=None)
def test_ranks_depths_and_the_spine_follow_from_the_trie(case):
    batch, num_candidates, _, seed = case
    proposal = random_proposal(batch, num_candidates, seed)
    ranks = sibling_ranks(proposal.parent_index, proposal.log_q)
    depth = depths(proposal.parent_index, 20)
    spine = on_spine(proposal.parent_index, ranks, 20)
    for b in range(batch):
        for m in candidate_paths(proposal, b):
            path = ranked_path(proposal, b, m)
            assert (int(ranks[b, m]), int(depth[b, m])) == (path[-1], len(path))
            assert bool(spine[b, m]) == (set(path) == {0})


@given(cases, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_calibration_scales_drafts_by_place(case, depth):
    batch, num_candidates, budget, seed = case
    proposal = random_proposal(batch, num_candidates, seed)
    rng = random.Random(seed)
    table = [[[rng.uniform(-2, 0.5) for _ in range(2)] for _ in range(2)] for _ in range(2)]
    found = Calibration(table)(proposal.parent_index, proposal.log_q, depth)
    for b in range(batch):
        for m in candidate_paths(proposal, b):
            path = ranked_path(proposal, b, m)
            if len(path) > depth:
                continue
            row = table[min(len(path), 2) - 1][min(path[-1], 1)]
            expected = float(proposal.log_q[b, m]) + row[set(path[:-1]) <= {0}]
            assert float(found[b, m]) == pytest.approx(min(0.0, expected), abs=1e-6)
    bonus = torch.zeros(batch).long()
    same = DraftProposal(proposal.tokens, proposal.parent_index, found)
    one = BestFirstBuilder(depth, calibration={"log_factor": table}).build(proposal, bonus, budget)
    other = BestFirstBuilder(depth).build(same, bonus, budget)
    assert torch.equal(one.tokens, other.tokens)
    check_form(one, bonus)


def test_calibration_leaves_a_shape_as_it_is():
    """Factors that swap siblings: their children stay those that the drafter expanded."""
    proposal = DraftProposal(
        torch.tensor([[1, 2, 3]]), torch.tensor([[-1, -1, 0]]), torch.tensor([[-0.1, -0.2, -0.3]])
    )
    swap = {"log_factor": [[[0.0, -5.0], [0.0, 0.0]], [[0.0, 0.0]] * 2]}
    shape = [[0], [1], [0, 0]]
    for builder in (StaticBuilder(shape, swap), StaticBuilder(shape)):
        tree = builder.build(proposal, torch.tensor([0]), 3)
        assert drafts_of(tree, 0) == {1, 2, 3}
    chain = ChainBuilder(2, swap).build(proposal, torch.tensor([0]), 2)
    assert drafts_of(chain, 0) == {1, 3}


@given(cases, st.lists(st.floats(0.1, 5.0), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_cost_stops_where_tokens_per_second_are_most(case, steps):
    batch, num_candidates, budget, seed = case
    points = [(0, 3.0)]
    for step in sorted(steps):  # convex
        points.append((points[-1][0] + 2, points[-1][1] + step))

    def seconds(n):
        i = max(i for i in range(len(points) - 1) if points[i][0] <= n)
        (a, start), (b, end) = points[i], points[i + 1]
        return start + (n - a) * (end - start) / (b - a)

    proposal, bonus = random_proposal(batch, num_candidates, seed), torch.zeros(batch).long()
    full = BestFirstBuilder(4).build(proposal, bonus, budget)
    tree = BestFirstBuilder(4, cost=points).build(proposal, bonus, budget)
    check_form(tree, bonus)
    for b in range(batch):
        num_drafts = int(full.num_nodes[b]) - 1
        gains = full.log_q[b, : num_drafts + 1].exp().cumsum(0).tolist()
        theta = [gains[n] / seconds(n) for n in range(num_drafts + 1)]
        assert theta[int(tree.num_nodes[b]) - 1] == pytest.approx(max(theta), rel=1e-5)


def test_cost_that_is_flat_stops_nothing_and_a_steep_one_everything():
    proposal, bonus = random_proposal(2, 9, 3), torch.zeros(2).long()
    full = BestFirstBuilder(4).build(proposal, bonus, 6)
    for points, expected in (([(0, 9.0), (1, 9.0001)], full.num_nodes), ([(0, 1.0), (1, 9.0)], 1)):
        tree = BestFirstBuilder(4, cost=points).build(proposal, bonus, 6)
        assert (tree.num_nodes == expected).all()


@pytest.mark.parametrize(
    "builder",
    [
        ChainBuilder(200),
        StaticBuilder([[rank] for rank in range(256)]),
        BeamBuilder(8, 16),
        ExpandBuilder(8, 7),
        BestFirstBuilder(8),
    ],
    ids=lambda builder: type(builder).__name__,
)
def test_the_largest_trees_and_batches_keep_the_form(builder):
    """256 requests with 256 nodes each."""
    batch, num_candidates = 256, 1024
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand((batch, num_candidates), generator=generator) ** 3
    parents = (torch.arange(num_candidates) * spread).long() - 1  # before the candidate
    log_q = -torch.rand((batch, num_candidates), generator=generator)
    tokens = torch.arange(num_candidates).expand(batch, -1)
    tree = builder.build(DraftProposal(tokens, parents, log_q), tokens[:, 0], 255)
    assert tree.tokens.shape == (batch, 256)
    assert (tree.num_nodes >= 2).all()
    for row in (0, 100, 255):
        one = type(tree)(
            **{
                name: None if value is None else value[row : row + 1]
                for name, value in vars(tree).items()
            }
        )
        check_form(one, tokens[:1, 0])


def test_drawn_drafts_keep_their_order_whatever_they_are():
    """The likelier sibling was drawn second, and the least likely of all is verified, too."""
    law = DraftLaw(torch.arange(8).expand(1, 4, 8).clone(), torch.full((1, 4, 8), 0.125))
    law.probs[0, :, 0] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    log_q = torch.tensor([[-9.0, -0.1, -5.0]])
    proposal = DraftProposal(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, -1, 0]]), log_q, law=law)
    tree = StaticBuilder([[0], [1], [0, 0]]).build(proposal, torch.tensor([4]), 4)
    assert tree.tokens.tolist() == [[4, 5, 6, 7, 0]]
    assert tree.parent_index.tolist() == [[-1, 0, 0, 1, 0]]
    assert tree.num_nodes.tolist() == [4]
    assert tree.law.probs[0, :, 0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.0])
    cut = StaticBuilder([[0], [1], [0, 0]]).build(proposal, torch.tensor([4]), 2)
    assert cut.tokens.tolist() == [[4, 5, 6]]
    assert cut.law.tokens.shape == (1, 3, 8)


def test_drawn_drafts_without_a_token_left_stand_last():
    law = DraftLaw(torch.zeros((1, 4, 1)).long(), torch.ones((1, 4, 1)))
    log_q = torch.tensor([[-0.0, -torch.inf, -1.0]])
    proposal = DraftProposal(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, -1, 0]]), log_q, law=law)
    tree = StaticBuilder([[0], [1], [0, 0]]).build(proposal, torch.tensor([4]), 3)
    assert tree.tokens.tolist() == [[4, 5, 7, 0]]
    assert tree.parent_index.tolist() == [[-1, 0, 1, 0]]
    assert tree.num_nodes.tolist() == [3]


@pytest.mark.parametrize("builder", [BestFirstBuilder(2), BeamBuilder(2, 2), ExpandBuilder(2, 2)])
def test_trees_that_choose_refuse_drawn_drafts(builder):
    law = DraftLaw(torch.zeros((1, 2, 1)).long(), torch.ones((1, 2, 1)))
    proposal = DraftProposal(
        torch.tensor([[5]]), torch.tensor([[-1]]), torch.zeros((1, 1)), law=law
    )
    with pytest.raises(AssertionError, match="fixed shape"):
        builder.build(proposal, torch.tensor([4]), 1)


def test_drawn_drafts_are_not_priced():
    law = DraftLaw(torch.zeros((1, 2, 1)).long(), torch.ones((1, 2, 1)))
    proposal = DraftProposal(
        torch.tensor([[5]]), torch.tensor([[-1]]), torch.zeros((1, 1)), law=law
    )
    with pytest.raises(AssertionError, match="all verified"):
        ChainBuilder(2).build(proposal, torch.tensor([4]), 1, 0.5)


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
