"""Merging: one trie that says of every path what the boldest of its sources says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.drafters.base import FeatureDrafter, FeatureNeeds, TokenDrafter
from specstack.drafters.merge import MergeDrafter, merge_proposals
from specstack.drafters.ngram import NgramDrafter
from specstack.models.heads.features import TargetFeatures
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.types import CommittedTokens, DraftBatch, DraftProposal

CPU, DEPTH, INF = torch.device("cpu"), 4, float("inf")


@st.composite
def tries(draw, batch):
    """A proposal over few tokens, so that paths coincide; {path: log q} per row beside it."""
    width = draw(st.integers(0, 8))
    rows, laws = [], []
    for _ in range(batch):
        paths, row, law = [], [], {}
        for _ in range(draw(st.integers(0, width))):
            parent = draw(st.integers(-1, len(paths) - 1))
            above = paths[parent] if parent >= 0 else ()
            path = (*above, draw(st.integers(0, 2)))
            if path in law or len(path) > DEPTH:
                continue
            law[path] = -draw(st.integers(0, 12)) / 4
            paths.append(path)
            row.append((path[-1], parent, law[path]))
        rows.append(row + [(0, -1, -INF)] * (width - len(row)))
        laws.append(law)
    flat = [[[cell[i] for cell in row] for row in rows] for i in range(3)]
    size = (batch, width)
    return DraftProposal(
        torch.tensor(flat[0], dtype=torch.int64).reshape(size),
        torch.tensor(flat[1], dtype=torch.int64).reshape(size),
        torch.tensor(flat[2], dtype=torch.float32).reshape(size),
    ), laws


def read(proposal, row):
    """[(path, log q, sources)] of a row: parents before children, no path twice, dead ones last."""
    paths, found = [], []
    for m in range(proposal.tokens.shape[1]):
        parent, log_q = int(proposal.parent_index[row, m]), float(proposal.log_q[row, m])
        if log_q == -INF:
            assert (proposal.log_q[row, m:] == -INF).all()
            assert (proposal.sources[row, m:] == 0).all()
            break
        assert -1 <= parent < m
        paths.append((*(paths[parent] if parent >= 0 else ()), int(proposal.tokens[row, m])))
        found.append((paths[-1], log_q, int(proposal.sources[row, m])))
    assert len(set(paths)) == len(paths)
    return found


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_a_merge_is_the_union_of_its_tries(data, batch, num_sources) -> None:
    drawn = [data.draw(tries(batch)) for _ in range(num_sources)]
    merged = merge_proposals([proposal for proposal, _ in drawn], DEPTH, CPU)
    for row in range(batch):
        laws = [laws[row] for _, laws in drawn]
        found = read(merged, row)
        assert {path for path, *_ in found} == {path for law in laws for path in law}
        for path, log_q, sources in found:
            assert log_q == max(law[path] for law in laws if path in law)
            assert sources == sum(1 << i for i, law in enumerate(laws) if path in law)


@given(st.data(), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_what_one_source_alone_proposes_stays_as_it_is(data, place) -> None:
    proposal, laws = data.draw(tries(2))
    nothing = DraftProposal(
        proposal.tokens[:, :0], proposal.parent_index[:, :0], proposal.log_q[:, :0]
    )
    given_all = [nothing] * place + [proposal] + [nothing] * (2 - place)
    merged = merge_proposals(given_all, DEPTH, CPU)
    for name in ("tokens", "parent_index", "log_q"):
        assert torch.equal(getattr(merged, name), getattr(proposal, name))
    assert set(merged.sources.unique().tolist()) <= {0, 1 << place}
    assert [len(read(merged, row)) for row in range(2)] == [len(law) for law in laws]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_merging_with_itself_changes_nothing_but_the_sources(data) -> None:
    proposal, laws = data.draw(tries(2))
    merged = merge_proposals([proposal, proposal], DEPTH, CPU)
    for row, law in enumerate(laws):
        assert read(merged, row) == [(path, law[path], 3) for path in law]


@given(st.data(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_trees_remember_the_sources_of_their_nodes(data, budget) -> None:
    drawn = [data.draw(tries(2)) for _ in range(2)]
    merged = merge_proposals([proposal for proposal, _ in drawn], DEPTH, CPU)
    for builder in (BestFirstBuilder(DEPTH), ChainBuilder(DEPTH)):
        tree = builder.build(merged, torch.tensor([7, 7]), budget)
        for row in range(2):
            known = {path: sources for path, _, sources in read(merged, row)}
            paths = [()]
            for node in range(1, int(tree.num_nodes[row])):
                above = paths[int(tree.parent_index[row, node])]
                paths.append((*above, int(tree.tokens[row, node])))
                assert int(tree.sources[row, node]) == known[paths[-1]]
            assert tree.sources[row, 0] == 0
            assert (tree.sources[row, int(tree.num_nodes[row]) :] == 0).all()
        narrow = tree.narrow(int(tree.num_nodes.max()))
        assert narrow.sources.shape == narrow.tokens.shape


def test_large_token_ids_do_not_collide() -> None:
    top = 2**31 - 1
    one = DraftProposal(torch.tensor([[top, 0]]), torch.tensor([[-1, 0]]), torch.zeros(1, 2))
    two = DraftProposal(torch.tensor([[0, top]]), torch.tensor([[-1, 0]]), torch.zeros(1, 2))
    merged = merge_proposals([one, two], DEPTH, CPU)
    assert [path for path, *_ in read(merged, 0)] == [(top,), (top, 0), (0,), (0, top)]


class Recorder(FeatureDrafter):
    """Keeps what it absorbs, proposes nothing."""

    def __init__(self, needs: FeatureNeeds) -> None:
        self.needs, self.seen = needs, []

    def absorb(self, committed: CommittedTokens) -> None:
        self.seen.append(committed.features)

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        none = torch.zeros(len(batch.slots), 0, dtype=torch.int64)
        return DraftProposal(none, none, none.float())


def batch_of(*slots: int) -> DraftBatch:
    zeros = torch.zeros(len(slots), dtype=torch.int64)
    return DraftBatch(slots, zeros, zeros, torch.zeros(len(slots), 0, dtype=torch.int64))


def test_each_drafter_absorbs_the_layers_that_it_asked_for() -> None:
    one, two = Recorder(FeatureNeeds((5, 1), ())), Recorder(FeatureNeeds((2, 5), (3,)))
    merge = MergeDrafter([one, NgramDrafter(4), two], DEPTH)
    assert merge.needs == FeatureNeeds((1, 2, 5), (3,))
    assert merge.needs_tokens
    hidden = torch.tensor([1.0, 2.0, 5.0]).view(1, 3, 1)
    kv = torch.full((1, 1, 1, 1), 3.0)
    index = torch.zeros(1, dtype=torch.int64)
    features = TargetFeatures(hidden, kv, kv)
    merge.absorb(CommittedTokens(features, index, index, index, index, batch_of(0), 1))
    assert one.seen[0].hidden.flatten().tolist() == [5.0, 1.0]
    assert one.seen[0].keys is None
    assert two.seen[0].hidden.flatten().tolist() == [2.0, 5.0]
    assert two.seen[0].values.flatten().tolist() == [3.0]


def test_tokens_go_to_those_that_read_them() -> None:
    ngram = NgramDrafter(4)
    merge = MergeDrafter([Recorder(FeatureNeeds((0,), ())), ngram], DEPTH)
    merge.begin(0, [1, 2, 3])
    merge.observe(0, [1, 2])
    merged, alone = merge.propose(batch_of(0), 4), ngram.propose(batch_of(0), 4)
    assert torch.equal(merged.tokens, alone.tokens)
    assert merged.sources.unique().tolist() == [2]
    ngram.begin(1, [1, 2, 3])
    merge.forget()
    assert ngram._slots == {}
    assert not MergeDrafter([Recorder(FeatureNeeds((0,), ()))] * 2, DEPTH).needs_tokens
    assert MergeDrafter([ngram, ngram], DEPTH).needs is None


def test_a_token_drafter_absorbs_nothing() -> None:
    with pytest.raises(AssertionError, match="absorbs no features"):
        TokenDrafter().absorb(replace)
