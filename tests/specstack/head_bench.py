"""A head drafter beside its own head: requests, absorbed features, exact laws of paths."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from specstack.drafters.autoregressive import AutoregressiveDrafter
from specstack.drafters.base import DraftRuntime
from specstack.drafters.block import BlockDrafter
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
    SUM_LOW_RANK,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)
from specstack.models.heads.vocabulary import DraftVocabulary
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
    "block kv linear": ("block", KV_LINEAR, {}),
    "block sum low rank": ("block", SUM_LOW_RANK, {}),
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


REFRESH = {"conditioning": {"kind": "refresh"}}


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

    def __init__(
        self, case: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float64, **options
    ) -> None:
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
            DraftRuntime(tables.to(dtype=dtype), NUM_KV_SLOTS, 8, torch.device("cpu"), dtype)
        )
        self.dtype = dtype
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
            return (packed * poison.view(-1, *[1] * (packed.ndim - 1))).to(self.dtype)

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
            assert log_q <= 1e-6
            assert paths[-1] not in found
            found[paths[-1]] = log_q + (found[above] if above else 0.0)
    return found


def check(proposal, row, law, budget):
    """Every candidate has its log q, and the best are there."""
    found = paths_of(proposal, row)
    for path, log_q in found.items():
        assert log_q == pytest.approx(law[path], abs=1e-5)
    ranked = sorted(law, key=lambda path: -law[path])
    assert set(ranked[:budget]) <= set(found)


def three_requests(bench):
    free = torch.randperm(NUM_KV_SLOTS).tolist()
    return [bench.request(n, free[10 * i :]) for i, n in enumerate((5, 1, 7))]
