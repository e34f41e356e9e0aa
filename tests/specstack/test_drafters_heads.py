"""Head drafters: their proposals are the best paths of the head's own law, however it is fed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from head_bench import (
    CASES,
    DEPTH,
    REFRESH,
    Bench,
    Request,
    block_hidden,
    check,
    paths_of,
    three_requests,
    whole_context,
)
from torch.utils._python_dispatch import TorchDispatchMode

import specstack.drafters.autoregressive as autoregressive
from specstack.drafters.committed_layout import CommittedLayout
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.testing import (
    HIDDEN,
    random_features,
)


@pytest.mark.parametrize("budget", [1, 4, 9])
@pytest.mark.parametrize("case", CASES)
def test_a_proposal_holds_the_best_of_all_paths(case: str, budget: int, tmp_path: Path) -> None:
    """Requests of different lengths, scattered slots, garbage where nothing was written."""
    bench = Bench(case, tmp_path)
    requests, slots = three_requests(bench), [6, 0, 3]
    lengths = [r.length for r in requests]
    bench.absorb(requests, slots, [0, 0, 0], lengths, padding=2)
    proposal = bench.drafter.propose(bench.batch(requests, slots, lengths), budget)
    for row, request in enumerate(requests):
        check(proposal, row, bench.law(request), budget)


@pytest.mark.parametrize("case", CASES)
def test_absorbing_in_pieces_equals_absorbing_at_once(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(case, tmp_path)
    requests, slots = three_requests(bench), [6, 0, 3]
    lengths = [r.length for r in requests]
    batch = bench.batch(requests, slots, lengths)
    bench.absorb(requests, slots, [0, 0, 0], lengths)
    at_once = bench.drafter.propose(batch, 6)
    bench.poison()
    bench.absorb(requests, slots, [0, 0, 0], [2, 1, 0], padding=1)
    bench.absorb(requests, slots, [2, 1, 0], [2, 1, 4])  # two of them have no new token
    bench.absorb(requests, slots, [2, 1, 4], lengths)
    in_calls = bench.drafter.propose(batch, 6)
    bench.poison()
    monkeypatch.setattr(autoregressive, "ABSORB_COLUMNS", 3)
    bench.absorb(requests, slots, [0, 0, 0], lengths, padding=1)
    for other in (in_calls, bench.drafter.propose(batch, 6)):
        assert torch.equal(at_once.tokens, other.tokens)
        assert torch.equal(at_once.parent_index, other.parent_index)
        torch.testing.assert_close(at_once.log_q, other.log_q)


@pytest.mark.parametrize("case", CASES)
def test_a_prefix_is_shared_at_its_kv_slots(case: str, tmp_path: Path) -> None:
    """A second request with the same beginning absorbs its own end alone."""
    bench = Bench(case, tmp_path)
    first = bench.request(6, list(range(10, 20)))
    tokens, kept = first.tokens.clone(), 4
    tokens[kept + 1 :] = torch.randint(40, (len(tokens) - kept - 1,))
    own = random_features(bench.head.config, 6)
    mixed = [
        None if a is None else torch.cat([a[:kept], b[kept:]])
        for a, b in zip(vars(first.features).values(), vars(own).values(), strict=True)
    ]
    second = Request(tokens, TargetFeatures(*mixed), [*first.kv_slots[:kept], 40, 41])
    bench.absorb([first], [0], [0], [6])
    bench.absorb([second], [1], [kept], [6])
    proposal = bench.drafter.propose(bench.batch([first, second], [0, 1], [6, 6]), 5)
    check(proposal, 0, bench.law(first), 5)
    check(proposal, 1, bench.law(second), 5)


@pytest.mark.parametrize("case", [case for case in CASES if "markov" in case or "gru" in case])
@pytest.mark.parametrize("candidates", [1, 3])
def test_fewer_candidates_keep_probabilities_proper(
    case: str, candidates: int, tmp_path: Path
) -> None:
    """Those outside keep their uncorrected weight: no node's children exceed one together."""
    bench = Bench(case, tmp_path, candidates=candidates)
    (request, *_), slots = three_requests(bench), [2]
    bench.absorb([request], slots, [0], [request.length])
    proposal = bench.drafter.propose(bench.batch([request], slots, [request.length]), 9)
    totals: dict[int, float] = {}
    for parent, log_q in zip(
        proposal.parent_index[0].tolist(), proposal.log_q[0].exp().tolist(), strict=True
    ):
        totals[parent] = totals.get(parent, 0.0) + log_q
    assert all(total < 1 for total in totals.values())
    head, anchor = bench.head, int(request.tokens[request.length])
    hidden = block_hidden(head, request)[0]
    base, corrected = head.logits(hidden), head.logits(hidden, torch.tensor(anchor))
    best = base.topk(candidates).indices
    mixed = base.clone()
    mixed[best] = corrected[best]
    expected = mixed.log_softmax(-1)[best]
    ids = head.vocabulary.to_target(best).tolist()
    of_root = {p[0]: q for p, q in paths_of(proposal, 0).items() if len(p) == 1}
    assert of_root == pytest.approx(dict(zip(ids, expected.tolist(), strict=True)), abs=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if "seeded" in case])
def test_a_seed_is_the_features_of_a_requests_last_token(case: str, tmp_path: Path) -> None:
    bench = Bench(case, tmp_path)
    requests, slots = three_requests(bench), [6, 0, 3]
    lengths = [r.length for r in requests]
    batch, seeds = bench.batch(requests, slots, lengths), bench.drafter._seeds
    bench.absorb(requests, slots, [0, 0, 0], [3, 1, 7])
    bench.absorb(requests, slots, [3, 1, 7], lengths, padding=2)
    for request, slot in zip(requests, slots, strict=True):
        torch.testing.assert_close(seeds[slot], bench.head.fuse(request.features)[-1])
    proposal = bench.drafter.propose(batch, 4)
    seeds[[6, 0, 3]] = seeds[[0, 3, 6]]  # control: those of other requests
    assert not torch.isclose(bench.drafter.propose(batch, 4).log_q, proposal.log_q).all(1).any()
    bench.absorb(requests[2:], slots[:1], [0], lengths[2:])  # the first has left its slot
    again = bench.batch(requests[2:], slots[:1], lengths[2:])
    check(bench.drafter.propose(again, 4), 0, bench.law(requests[2]), 4)


def test_the_last_row_of_a_request_is_its_last_token() -> None:
    def layout(requests: list[int]) -> CommittedLayout:
        return CommittedLayout(torch.tensor(requests), torch.zeros(len(requests)).long(), 4, 9)

    packed, before = torch.arange(14.0).view(7, 2), -torch.ones(4, 2)
    # Requests side by side; 4 is padding, the row that 1 has is that of before.
    assert layout([2, 4, 0, 2, 0, 3, 4]).last(packed, before)[:, 0].tolist() == [8, -1, 6, 10]
    assert layout([4] * 7).last(packed, before)[:, 0].tolist() == [-1] * 4
    packed[[1, 6]] = torch.nan
    assert layout([2, 4, 0, 2, 0, 3, 4]).last(packed, before).isfinite().all()
    assert layout([2, 1, 0, 2, 0, 3, 4]).last(packed, before)[1].isnan().all(), "control"


@pytest.mark.parametrize("budget", [1, 4, 9, 300])
def test_refresh_scores_the_children_of_the_first_tree_by_their_paths(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "refresh", ("block", HIDDEN, REFRESH))
    monkeypatch.setitem(CASES, "first", ("block", HIDDEN, {}))
    first = Bench("first", tmp_path / "first")
    bench = Bench("refresh", tmp_path / "refresh")
    requests, slots = three_requests(bench), [6, 0, 3]
    lengths = [r.length for r in requests]
    batch = bench.batch(requests, slots, lengths)
    for one in (first, bench):
        one.absorb(requests, slots, [0, 0, 0], lengths)
    proposal = bench.drafter.propose(batch, budget)
    marginal = first.drafter.propose(batch, budget)
    for row, request in enumerate(requests):
        law = {p: float(v) for p, v in refreshed_law(bench.head, request)}
        found = paths_of(proposal, row)
        for path, log_q in found.items():
            assert log_q == pytest.approx(law[path], abs=1e-5)
        ranked = sorted(paths_of(marginal, row).items(), key=lambda item: -item[1])
        first_tree = {path for path, _ in ranked[:budget]}
        assert first_tree <= set(found)
        leaves = sorted((p for p in law if p not in first_tree and p[:-1] in {(), *first_tree}),
                        key=lambda p: -law[p])  # fmt: skip
        assert set(found) - first_tree == set(leaves[:budget])


def refreshed_law(head, request):
    """Every path, its tokens given and one MASK behind them, in a pass of its own."""
    n, context = request.length, whole_context(head, request)
    ids = head.vocabulary.token_ids.tolist()
    above = {(): 0.0}
    for depth in range(DEPTH):
        for path in itertools.product(ids, repeat=depth):
            tokens = torch.tensor([[int(request.tokens[n]), *path, -1]])
            size = depth + 2
            mask = torch.cat(
                [torch.ones(size, n, dtype=torch.bool), torch.ones(size, size).tril().bool()], 1
            )
            hidden = head(tokens, torch.arange(n, n + size)[None], context, mask[None])[0, -1]
            for token, log_q in zip(ids, head.logits(hidden).log_softmax(-1), strict=True):
                above[(*path, token)] = above[path] + float(log_q)
                yield (*path, token), above[(*path, token)]


def test_a_block_is_not_asked_for_more_than_it_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_depth 4 is beyond block_size 4, which counts"):
        Bench("block", tmp_path, max_depth=4)


def test_a_drafter_of_features_states_what_it_reads(tmp_path: Path) -> None:
    drafter = Bench("autoregressive gated linear", tmp_path).drafter
    assert drafter.needs.target_layers == (1, 3, 5)
    assert drafter.needs.kv_layers == (0, 2, 4)
    assert not drafter.needs_tokens


class NoHostSync(TorchDispatchMode):
    """Refuses operators whose result the host has to wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero")
        assert not any(word in str(func) for word in waits), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [*CASES, "refresh"])
def test_nothing_waits_for_the_device(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "refresh", ("block", HIDDEN, REFRESH))
    bench = Bench(case, tmp_path)
    requests, slots = three_requests(bench), [6, 0, 3]
    lengths = [r.length for r in requests]
    batch = bench.batch(requests, slots, lengths)
    given = []
    monkeypatch.setattr(bench.drafter, "absorb", given.append)
    bench.absorb(requests, slots, [0, 0, 0], lengths, padding=2)
    monkeypatch.undo()
    with NoHostSync():
        type(bench.drafter).absorb(bench.drafter, *given)
        proposal = bench.drafter.propose(batch, 4)
    with pytest.raises(AssertionError), NoHostSync():  # control
        int(proposal.tokens[0, 0])
