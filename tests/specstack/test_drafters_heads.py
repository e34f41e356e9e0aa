"""Head drafters: their proposals are the best paths of the head's own law, however it is fed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specstack.drafters.autoregressive as autoregressive
from specstack.drafters.autoregressive import AutoregressiveDrafter
from specstack.drafters.base import DraftRuntime
from specstack.drafters.block import BlockDrafter
from specstack.drafters.committed_layout import CommittedLayout
from specstack.models.heads.checkpoint import make_head, save_head
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.layers import join
from specstack.models.heads.masks import block_mask, ttt_context_mask, ttt_mask
from specstack.models.heads.testing import (
    GATED,
    GATED_LINEAR,
    HIDDEN,
    KV,
    KV_LINEAR,
    SUM,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)
from specstack.models.heads.vocabulary import DraftVocabulary
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.types import CommittedTokens, DraftBatch

DRAFTED, DEPTH, NUM_KV_SLOTS = 6, 3, 50
CORRECTORS = [
    {"kind": kind, "rank": 3, "parent": parent, "output": output}
    for kind, parent, output in [
        ("markov", "embedding", "hidden"), ("markov", "table", "logits"),
        ("gru", "embedding", "hidden"), ("gru", "table", "logits"),
    ]
]  # fmt: skip
CASES = {
    "block": ("block", HIDDEN, {}),
    "block bidirectional": ("block", HIDDEN, {"mask": "bidirectional", "block_size": 6}),
    "block kv": ("block", KV, {}),
    "block sum": ("block", SUM, {}),
    **{f"block {c['kind']} {c['output']}": ("block", HIDDEN, {"conditioning": c})
       for c in CORRECTORS},
    "seeded": ("block", HIDDEN, {"slots": "seeded"}),
    "seeded bidirectional": (
        "block", HIDDEN, {"slots": "seeded", "mask": "bidirectional", "block_size": 6}
    ),
    "seeded sum": ("block", SUM, {"slots": "seeded"}),
    "seeded gru": ("block", HIDDEN, {"slots": "seeded", "conditioning": CORRECTORS[2]}),
    "autoregressive": ("autoregressive", HIDDEN, {}),
    "autoregressive norms": ("autoregressive", HIDDEN, {"extra_norms": True}),
    "autoregressive kv": ("autoregressive", KV, {}),
    "autoregressive kv linear": ("autoregressive", KV_LINEAR, {}),
    "autoregressive gated": ("autoregressive", GATED, {}),
    "autoregressive gated linear": ("autoregressive", GATED_LINEAR, {}),
}  # fmt: skip


@dataclass
class Request:
    """Committed tokens, the bonus token, and the features of the committed ones."""

    tokens: torch.Tensor
    features: TargetFeatures
    kv_slots: list[int]

    @property
    def length(self) -> int:
        return len(self.tokens) - 1


class Bench:
    """A drafter of a random head, with the head itself beside it."""

    def __init__(self, case: str, folder: Path, seed: int = 0, **options) -> None:
        form, context, fields = CASES[case]
        torch.manual_seed(seed)
        config = tiny_config(form, context, draft_vocab_size=DRAFTED, **fields)
        counts = torch.rand(config.target.vocab_size)
        tables = random_tables(config)
        self.head = make_head(config, tables, DraftVocabulary.from_counts(counts, DRAFTED))
        randomise(self.head.requires_grad_(False))
        save_head(self.head, folder)
        kind = BlockDrafter if form == "block" else AutoregressiveDrafter
        self.drafter = kind(str(folder), **{"max_depth": DEPTH, **options})
        self.drafter.attach(
            DraftRuntime(tables, NUM_KV_SLOTS, 8, torch.device("cpu"), torch.float64)
        )
        self.poison()

    def poison(self) -> None:
        """What was never written must not matter."""
        pools = [self.drafter._pool] if hasattr(self.drafter, "_pool") else [
            self.drafter._memory.own, self.drafter._memory.context,
        ]  # fmt: skip
        for pool in filter(None, pools):
            for layer in pool.layers:
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
        if isinstance(self.drafter, BlockDrafter):
            self.drafter._seeds.fill_(torch.nan)

    def request(self, length: int, kv_slots: list[int]) -> Request:
        tokens = torch.randint(self.head.config.target.vocab_size, (length + 1,))
        return Request(tokens, random_features(self.head.config, length), kv_slots[:length])

    def batch(self, requests: list[Request], slots: list[int], done: list[int]) -> DraftBatch:
        """The requests with `done` committed tokens each."""
        table = torch.randint(NUM_KV_SLOTS, (len(requests), max(done) + 2))
        for row, (request, length) in enumerate(zip(requests, done, strict=True)):
            table[row, :length] = torch.tensor(request.kv_slots[:length], dtype=torch.int64)
        bonus = torch.stack([r.tokens[n] for r, n in zip(requests, done, strict=True)])
        return DraftBatch(tuple(slots), bonus, torch.tensor(done), table)

    def absorb(self, requests: list[Request], slots: list[int], start, end, padding=0) -> None:
        """Absorb tokens start[i]..end[i]-1 of each request, in one call, padded."""
        parts = [range(a, b) for a, b in zip(start, end, strict=True)]
        rows = [row for row, part in enumerate(parts) for _ in part] + [-1] * padding
        at = [(requests[row], i) for row, part in enumerate(parts) for i in part]
        at += [(requests[0], 0)] * padding
        places = [i for _, i in at[: len(at) - padding]] + [None] * padding
        poison = torch.tensor([torch.nan if row < 0 else 1.0 for row in rows]).double()

        def stacked(name):
            values = [getattr(r.features, name) for r, _ in at]
            if values[0] is None:
                return None
            packed = torch.stack([v[i] for v, (_, i) in zip(values, at, strict=True)])
            return packed * poison.view(-1, *[1] * (packed.ndim - 1))

        self.drafter.absorb(CommittedTokens(
            features=TargetFeatures(*map(stacked, ("hidden", "keys", "values"))),
            next_tokens=torch.stack([r.tokens[i + 1] for r, i in at]),
            positions=torch.tensor([77 if i is None else i for i in places]),
            kv_slots=torch.tensor([r.kv_slots[i] for r, i in at]),
            requests=torch.tensor(rows),
            batch=self.batch(requests, slots, start),
            max_new_tokens=max(map(len, parts)) + 1,
        ))  # fmt: skip

    def law(self, request: Request) -> dict[tuple[int, ...], float]:
        """Log q of every path up to the depth, by the head alone."""
        step = block_law if self.head.config.form == "block" else autoregressive_law
        ids = self.head.vocabulary.token_ids.tolist()
        paths: dict[tuple[int, ...], float] = {(): 0.0}
        for depth in range(DEPTH):
            for path in itertools.product(ids, repeat=depth):
                log_q = step(self.head, request, path).tolist()
                paths |= {(*path, t): paths[path] + q for t, q in zip(ids, log_q, strict=True)}
        del paths[()]
        return paths


def whole_context(head, request):
    context = head.context(request.features, torch.arange(request.length))
    if context is None:
        return None
    return [replace(kv, keys=kv.keys[None], values=kv.values[None]) for kv in context]


def block_law(head, request, path):
    hidden = block_hidden(head, request)[len(path)]
    if head.corrector is None:
        return head.logits(hidden).log_softmax(-1)
    parents = torch.tensor([int(request.tokens[request.length]), *path])
    states = head.path_states(parents)
    return head.logits(hidden, parents[-1], states[-1]).log_softmax(-1)


def block_hidden(head, request):
    """Of the slots that draft depths 1, 2, .."""
    n, slots = request.length, head.config.num_slots
    tokens = torch.arange(0, -slots, -1)[None].clone()
    tokens[0, 0] = request.tokens[n]
    lengths = torch.tensor([n])
    mask = block_mask(lengths[:, None], lengths, slots, n, head.config.mask)
    positions = torch.arange(n, n + slots)[None]
    inputs = tokens, positions, whole_context(head, request), mask
    if not head.is_seeded:
        return head(*inputs)[0, 1:]
    return head(*inputs, head.fuse(request.features)[-1].expand(1, slots, -1))[0]


def autoregressive_law(head, request, path):
    n, context = request.length, whole_context(head, request)
    lengths, features = torch.tensor([n]), request.features.index(None)
    mask = own_mask = ttt_mask(lengths, n, 0)
    if context is not None:
        mask = ttt_context_mask(lengths, n, n, 0)
    gated = head.is_gated
    hidden, prefix = head(
        request.tokens[None, 1:], head.fuse(features), torch.arange(1, n + 1)[None],
        None, context, mask, own_mask if gated else None,
    )  # fmt: skip
    hidden = hidden[:, -1:]
    for j, token in enumerate(path):
        mask = own_mask = torch.ones(1, 1, n + j + 1, dtype=torch.bool)
        if context is not None:
            drafts = own_mask.clone()
            drafts[..., : n - 1] = False
            mask = torch.cat([torch.ones(1, 1, n, dtype=torch.bool), drafts], dim=-1)
        hidden, own = head(
            torch.tensor([[token]]), hidden, torch.tensor([[n + 1 + j]]), prefix, context, mask,
            own_mask if gated else None,
        )  # fmt: skip
        prefix = [join(a, b) for a, b in zip(prefix, own, strict=True)]
    return head.logits(hidden)[0, 0].log_softmax(-1)


def paths_of(proposal, row):
    """{path of tokens: cumulative log q}, checking the form on the way."""
    paths, found = [], {}
    for m in range(proposal.tokens.shape[1]):
        parent, log_q = int(proposal.parent_index[row, m]), float(proposal.log_q[row, m])
        assert -1 <= parent < m
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, int(proposal.tokens[row, m])))
        if log_q > -torch.inf:
            assert log_q <= 1e-9
            assert paths[-1] not in found
            found[paths[-1]] = log_q + (found[above] if above else 0.0)
    return found


def check(proposal, row, law, budget):
    """Every candidate has its log q, the best are there, and so is the greedy chain."""
    found = paths_of(proposal, row)
    for path, log_q in found.items():
        assert log_q == pytest.approx(law[path], abs=1e-9)
    ranked = sorted(law, key=lambda path: -law[path])
    assert set(ranked[:budget]) <= set(found)
    chain: tuple[int, ...] = ()
    for _ in range(min(DEPTH, budget)):
        children = [path for path in law if path[:-1] == chain and len(path) == len(chain) + 1]
        chain = max(children, key=lambda path: law[path])
        assert chain in found


def three_requests(bench):
    free = torch.randperm(NUM_KV_SLOTS).tolist()
    return [bench.request(n, free[10 * i :]) for i, n in enumerate((5, 1, 7))]


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
def test_builders_find_the_best_nodes_and_the_greedy_chain(case: str, tmp_path: Path) -> None:
    bench = Bench(case, tmp_path)
    (request, *_), slots = three_requests(bench), [2]
    bench.absorb([request], slots, [0], [request.length])
    batch = bench.batch([request], slots, [request.length])
    law, proposal = bench.law(request), bench.drafter.propose(batch, 8)
    tree = BestFirstBuilder(DEPTH).build(proposal, batch.bonus_tokens, 8)
    expected = sorted(law.values(), reverse=True)[:8]
    assert tree.log_q[0, 1:].tolist() == pytest.approx(expected, abs=1e-9)
    chain = ChainBuilder(DEPTH).build(proposal, batch.bonus_tokens, 8)
    assert int(chain.num_nodes) == DEPTH + 1


@pytest.mark.parametrize("case", ["block", "autoregressive", "autoregressive gated"])
def test_width_limits_the_children_and_nothing_else(case: str, tmp_path: Path) -> None:
    bench = Bench(case, tmp_path, width=2)
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
    assert of_root == pytest.approx(dict(zip(ids, expected.tolist(), strict=True)), abs=1e-9)


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


REFRESH = {"conditioning": {"kind": "refresh"}}


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
            assert log_q == pytest.approx(law[path], abs=1e-9)
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
