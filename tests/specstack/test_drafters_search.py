"""What a tree and a device ask of head drafters: searches, context in a pool, context by one op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from head_bench import CASES, DEPTH, REFRESH, Bench, paths_of, three_requests

from specstack.drafters.context_writer import ContextWriter
from specstack.drafters.search import make_search
from specstack.trees.beam import BeamBuilder
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.trees.expand import ExpandBuilder
from specstack.trees.static import StaticBuilder
from specstack.types import DraftProposal


@pytest.mark.parametrize("case", CASES)
def test_builders_get_what_they_need(case: str, tmp_path: Path) -> None:
    """Each with its own search finds what it would find among all paths."""
    bench = Bench(case, tmp_path)
    (request, *_), slots = three_requests(bench), [2]
    bench.absorb([request], slots, [0], [request.length])
    batch, law = bench.batch([request], slots, [request.length]), bench.law(request)
    shape = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [0, 1, 1]]
    for search, builder in (
        ({}, BestFirstBuilder(DEPTH)),
        ({"width": 2}, BestFirstBuilder(DEPTH, 2)),
        ({"width": 1}, ChainBuilder(DEPTH)),
        ({"width": 2, "frontier": 2}, BeamBuilder(DEPTH, 2)),
        ({"width": 3, "families": True}, ExpandBuilder(DEPTH, 3)),
        ({"paths": shape}, StaticBuilder(shape)),
    ):
        bench.drafter.search = make_search(**search)
        proposal = bench.drafter.propose(batch, 8)
        if bench.drafter.config.conditioning.kind == "none":
            for path, log_q in paths_of(proposal, 0).items():
                assert log_q == pytest.approx(law[path], abs=1e-5)
        tree = builder.build(proposal, batch.bonus_tokens, 8)
        every = builder.build(whole_trie(law), batch.bonus_tokens, 8)
        assert tree.tokens.tolist() == every.tokens.tolist()
        assert tree.log_q.tolist() == [pytest.approx(every.log_q[0].tolist(), abs=1e-5)]


def test_a_shape_wider_than_a_head_has_what_there_is(tmp_path: Path) -> None:
    """Six tokens are drafted; one candidate per depth is corrected."""
    shape = [[0], *([rank] for rank in range(1, 9)), [0, 0], [7, 0], [0, 0, 0]]
    for case, options, expected in (
        ("block", {}, 9),
        ("block markov hidden", {"candidates": 1}, 4),
    ):
        bench = Bench(case, tmp_path / case, search={"paths": shape}, **options)
        (request, *_), slots = three_requests(bench), [2]
        bench.absorb([request], slots, [0], [request.length])
        batch = bench.batch([request], slots, [request.length])
        proposal = bench.drafter.propose(batch, len(shape))
        tree = StaticBuilder(shape).build(proposal, batch.bonus_tokens, len(shape))
        assert int(tree.num_nodes) == expected  # 6 + 2 drafts, or a chain of 3, and the root


def whole_trie(law):
    """All paths as candidates of one request."""
    paths = sorted(law, key=lambda path: (len(path), -law[path]))
    place = {path: i for i, path in enumerate(paths)}
    return DraftProposal(
        torch.tensor([[path[-1] for path in paths]]),
        torch.tensor([[place.get(path[:-1], -1) for path in paths]]),
        torch.tensor([[law[path] - law.get(path[:-1], 0.0) for path in paths]]),
    )


@pytest.mark.parametrize("case", ["block", "autoregressive", "autoregressive gated"])
def test_width_limits_the_children_and_nothing_else(case: str, tmp_path: Path) -> None:
    bench = Bench(case, tmp_path, search={"width": 2})
    (request, *_), slots = three_requests(bench), [2]
    bench.absorb([request], slots, [0], [request.length])
    proposal = bench.drafter.propose(bench.batch([request], slots, [request.length]), 9)
    law, found = bench.law(request), paths_of(proposal, 0)
    kept = {()}
    for path in sorted(law, key=len):
        better = sum(law[p] > law[path] for p in law if p[:-1] == path[:-1])
        if path[:-1] in kept and better < 2:
            kept.add(path)
    ranked = sorted(kept - {()}, key=lambda path: -law[path])
    assert set(ranked[:9]) <= set(found) <= kept


@pytest.mark.parametrize("case", [case for case in CASES if "autoregressive" not in case])
@pytest.mark.parametrize("refreshed", [False, True])
def test_paged_context_is_read_where_it_is(
    case: str, refreshed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with the same op's form for any device."""
    if refreshed:
        form, context, fields = CASES[case]
        if fields.keys() & {"conditioning", "slots"} or fields.get("mask") == "bidirectional":
            pytest.skip("a refresh pass is a conditioning of its own, of causal blocks")
        monkeypatch.setitem(CASES, case, (form, context, {**fields, **REFRESH}))
    bench = Bench(case, tmp_path)
    requests, slots = three_requests(bench), [6, 0, 3]
    lengths = [r.length for r in requests]
    bench.absorb(requests, slots, [0, 0, 0], lengths)
    batch = bench.batch(requests, slots, lengths)
    gathered = bench.drafter.propose(batch, 6)
    bench.drafter._pool.is_paged = True
    monkeypatch.setattr(bench.drafter._pool, "read", None)
    paged = bench.drafter.propose(batch, 6)
    assert torch.equal(gathered.tokens, paged.tokens)
    assert torch.equal(gathered.parent_index, paged.parent_index)
    torch.testing.assert_close(gathered.log_q, paged.log_q)
    bench.drafter._pool.layers[0].keys[requests[0].kv_slots[0]] += 1.0  # it is really read
    assert not torch.equal(bench.drafter.propose(batch, 6).log_q, paged.log_q)


@pytest.mark.parametrize("case", [case for case in CASES if "autoregressive" not in case])
def test_context_is_written_by_one_op_as_by_the_modules(case: str, tmp_path: Path) -> None:
    bench = Bench(case, tmp_path)
    requests, slots = three_requests(bench), [6, 0, 3]
    lengths, pool = [r.length for r in requests], bench.drafter._pool
    kept = []
    for writer in (None, ContextWriter(bench.head, pool)):
        bench.poison()
        bench.drafter._writer = writer
        bench.absorb(requests, slots, [0, 0, 0], lengths, padding=2)
        kept.append(pool._rows[:-1].clone())  # the last row is nobody's
    torch.testing.assert_close(*kept, equal_nan=True)
    assert kept[0].isnan().any()
    assert not kept[0].isnan().all()
