"""What drafts may know: passes of both forms against the heads' own reference, and no leaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.block import BlockHead
from specstack.models.heads.layers import join
from specstack.models.heads.masks import ttt_context_mask, ttt_mask
from specstack.models.heads.testing import (
    GATED,
    HIDDEN,
    KV,
    KV_LINEAR,
    SUM,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)
from specstack.training.batches import Draws, collate
from specstack.training.block_pass import block_hidden
from specstack.training.gates import Gates
from specstack.training.objective import Objective, Seen
from specstack.training.rows import output_depths, rows_of
from specstack.training.run_config import Loss
from specstack.training.texts import Text
from specstack.training.unroll import unroll

DEPTH = 3
SOURCES = {"hidden": HIDDEN, "kv": KV, "kv_linear": KV_LINEAR, "gated": GATED}


def make(form: str, context, **fields):
    torch.manual_seed(0)
    config = tiny_config(form, context, **fields)
    kind = BlockHead if form == "block" else AutoregressiveHead
    head = kind(config, random_tables(config))
    randomise(head)
    return head


def batch_of(head, lengths=((3, 12), (2, 9)), **draws):
    random = np.random.default_rng(0)
    vocab = head.config.target.vocab_size
    texts = [
        Text(str(i), random.integers(0, vocab, n).astype(np.int32), start)
        for i, (start, n) in enumerate(lengths)
    ]
    given = {"seed": "0", "per_sequence": None, "block_size": head.config.block_size, **draws}
    return collate(texts, range(len(texts)), Draws(**given))


def features_of(head, batch):
    torch.manual_seed(1)
    return random_features(head.config, *batch.tokens.shape)


def reference(head, batch, features, depth):
    """The unrolling over all inputs, [B, Q, K, D]."""
    num_inputs = batch.tokens.shape[1] - depth
    length = torch.full((len(batch.tokens),), num_inputs)
    places = torch.arange(batch.tokens.shape[1]).expand(len(batch.tokens), -1)
    context = head.context(features, places)
    hidden, prefix, outputs = head.fuse(features)[:, :num_inputs], None, []
    for step in range(depth):
        mask = own = ttt_mask(length, num_inputs, step)
        if context is not None:
            mask = ttt_context_mask(length, num_inputs, batch.tokens.shape[1], step)
        at = slice(1 + step, 1 + step + num_inputs)
        masks = (mask, own if head.is_gated else None)
        hidden, owns = head(batch.tokens[:, at], hidden, places[:, at], prefix, context, *masks)
        prefix = owns if prefix is None else list(map(join, prefix, owns))
        outputs.append(hidden)
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("source", SOURCES)
def test_unrolling_from_anchors_equals_unrolling_everywhere(source: str) -> None:
    head = make("autoregressive", SOURCES[source])
    batch = batch_of(head, per_sequence=4)
    features = features_of(head, batch)
    found, expected = unroll(head, batch, features, DEPTH), reference(head, batch, features, DEPTH)
    for b, k in np.ndindex(len(batch.tokens), batch.anchors.shape[1]):
        if 0 < (anchor := int(batch.anchors[b, k])) <= expected.shape[1]:
            torch.testing.assert_close(found[b, k], expected[b, anchor - 1])


HEADS = {
    "block": ("block", HIDDEN, {}),
    "block_bidirectional": ("block", KV, {"mask": "bidirectional"}),
    "block_sum": ("block", SUM, {}),
    "refresh": ("block", HIDDEN, {"conditioning": {"kind": "refresh"}}),
    "markov": ("block", HIDDEN, {"conditioning": {"kind": "markov", "rank": 3}}),
    "gru": ("block", HIDDEN, {"conditioning": {"kind": "gru", "rank": 3}}),
    "seeded": ("block", HIDDEN, {"slots": "seeded"}),
    "seeded_bidirectional": ("block", SUM, {"slots": "seeded", "mask": "bidirectional"}),
    "seeded_gru": (
        "block", HIDDEN, {"slots": "seeded", "conditioning": {"kind": "gru", "rank": 3}}
    ),
    **{f"autoregressive_{name}": ("autoregressive", x, {}) for name, x in SOURCES.items()},
}  # fmt: skip
BLOCKS = [name for name, (form, *_) in HEADS.items() if form == "block"]


def alone(head, tokens, features, anchor: int):
    """Hidden states of the one block behind the tokens before its anchor, [S, D]."""
    slots, before = head.config.num_slots, features.index((slice(None), slice(anchor)))
    inputs = torch.tensor([[int(tokens[anchor]), *(-slot for slot in range(1, slots))]])
    own = torch.ones(slots, slots, dtype=torch.bool)
    own = own.tril() if head.config.mask == "tree_causal" else own
    mask = torch.cat([torch.ones(slots, anchor, dtype=torch.bool), own], dim=1)[None]
    context = head.context(before, torch.arange(anchor)[None])
    seed = head.fuse(before)[:, -1:].expand(-1, slots, -1) if head.is_seeded else None
    return head(inputs, torch.arange(anchor, anchor + slots)[None], context, mask, seed)[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_one_pass_over_all_blocks_equals_every_block_alone(name: str) -> None:
    form, context, fields = HEADS[name]
    head = make(form, context, **fields)
    batch = batch_of(head)
    features = features_of(head, batch)
    found = block_hidden(head, batch, features)
    assert found.shape == (*batch.anchors.shape, head.config.num_slots, 24)
    for b, k in np.ndindex(*batch.anchors.shape):
        if (anchor := int(batch.anchors[b, k])) > 0:
            given = batch.tokens[b], features.index(slice(b, b + 1))
            torch.testing.assert_close(found[b, k], alone(head, *given, anchor))
            other = alone(head, *given, anchor - 1)
            assert not torch.isclose(found[b, k], other).all(-1).any(), "control: another anchor"


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_knows_no_token_but_its_anchor(name: str) -> None:
    form, context, fields = HEADS[name]
    head = make(form, context, **fields)
    batch = batch_of(head, [(4, 9)], per_sequence=1)
    anchor, features = int(batch.anchors[0, 0]), features_of(head, batch)
    base = block_hidden(head, batch, features)
    for place in range(9):
        tokens = batch.tokens.clone()
        tokens[0, place] = (tokens[0, place] + 1) % 40
        moved = block_hidden(head, replace(batch, tokens=tokens), features) != base
        assert moved.any() == (place == anchor)


def loss_of(head, batch, features, final):
    depth = DEPTH if isinstance(head, BlockHead) else head.config.block_size
    objective = Objective(head, Loss(), depth, torch.float32)
    rows = objective.rows(batch)
    seen = Seen(features, final)
    return objective(batch, rows, seen, objective.weight(rows))["loss"]


@pytest.mark.parametrize("name", HEADS)
def test_features_of_the_anchor_and_after_do_not_change_the_loss(name: str) -> None:
    form, context, fields = HEADS[name]
    head = make(form, context, **fields)
    batch = batch_of(head, [(5, 9)], per_sequence=1, refresh_share=0.5)
    anchor = int(batch.anchors[0, 0])
    features, final = features_of(head, batch), torch.randn(1, 9, 24, dtype=torch.float64)
    base = loss_of(head, batch, features, final)
    for token, changes in ((anchor, False), (anchor - 1, True)):
        other = features.index(slice(None))
        other = type(other)(*(None if x is None else x.clone() for x in vars(other).values()))
        for tensor in vars(other).values():
            if tensor is not None:
                tensor[0, token] += 1.0
                if not changes:
                    tensor[0, token:] += 1.0
        assert (loss_of(head, batch, other, final) != base) == changes


@pytest.mark.parametrize("name", HEADS)
def test_gradient_reaches_every_weight(name: str) -> None:
    form, context, fields = HEADS[name]
    head = make(form, context, **fields)
    batch = batch_of(head, refresh_share=0.5)
    final = torch.randn(*batch.tokens.shape, 24, dtype=torch.float64)
    loss_of(head, batch, features_of(head, batch), final).backward()
    assert [n for n, p in head.named_parameters() if p.grad is None or not p.grad.any()] == []
    if isinstance(head, BlockHead):
        assert head.mask_embedding.grad.any(dim=-1).all(), "every MASK"


def test_a_mask_slot_says_its_own_token_and_a_real_one_the_next() -> None:
    head = make("block", HIDDEN, conditioning={"kind": "refresh"})
    batch = batch_of(head, [(3, 12)], per_sequence=3)
    batch = replace(batch, num_real=torch.tensor([[1, 2, 4]]))
    expected = [[0, 1, 2, 3], [1, 2, 2, 3], [1, 2, 3, 0]]
    assert output_depths(batch, head.config)[0].tolist() == expected


def test_a_slot_of_a_seeded_block_says_the_token_after_its_own() -> None:
    head = make("block", HIDDEN, slots="seeded")
    batch = batch_of(head, [(3, 12)], per_sequence=2)
    assert output_depths(batch, head.config)[0].tolist() == [[1, 2, 3], [1, 2, 3]]
    masked = make("block", HIDDEN).config
    assert output_depths(batch, masked)[0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("slots", ["masked", "seeded"])
def test_rows_are_the_drafts_whose_token_exists(slots: str) -> None:
    head = make("block", HIDDEN, slots=slots)
    batch = batch_of(head, [(3, 7), (2, 5)])
    rows = rows_of(batch, head.config)
    tokens, length = batch.tokens, batch.tokens.shape[1]
    pairs = sorted((int(p), int(k)) for p, k in zip(rows.place, rows.depth, strict=True))
    expected = [
        (b * length + anchor + depth - 1, depth)
        for b, (start, end) in enumerate([(3, 7), (2, 5)])
        for anchor in range(start, end - 1)
        for depth in range(1, 4)
        if anchor + depth < end
    ]
    assert pairs == sorted(expected)
    block, slot = rows.output // head.config.num_slots, rows.output % head.config.num_slots
    assert torch.equal(slot, rows.depth - 1 if slots == "seeded" else rows.depth)
    starts = (torch.arange(2)[:, None] * length + batch.anchors).flatten()
    assert torch.equal(block, rows.block)
    assert torch.equal(rows.place, starts[block] + rows.depth - 1)
    assert torch.equal(rows.labels, tokens.flatten()[rows.place + 1])
    assert torch.equal(rows.parents, tokens.flatten()[rows.place])
    assert rows.place.tolist() == sorted(rows.place.tolist())


@pytest.mark.parametrize("slots", ["masked", "seeded"])
def test_padding_changes_nothing(slots: str) -> None:
    head = make("block", HIDDEN, slots=slots)
    batch = batch_of(head)
    features = features_of(head, batch)
    together = block_hidden(head, batch, features)
    alone = batch_of(head, [(3, 12)])
    first = block_hidden(head, alone, features.index(slice(1)))
    torch.testing.assert_close(together[:1, : first.shape[1]], first)


def test_mixed_prefix_tokens_are_seen_through_the_heads_own_keys() -> None:
    head = make("autoregressive", KV)
    batch = batch_of(head, [(4, 10)], per_sequence=1)
    mixed = torch.zeros_like(batch.mixed)
    mixed[0, 2] = True
    features = features_of(head, batch)

    def moved(batch) -> bool:
        other = type(features)(None, features.keys.clone(), features.values.clone())
        other.keys[0, 2] += 1
        other.values[0, 2] += 1
        same = unroll(head, batch, features, DEPTH) == unroll(head, batch, other, DEPTH)
        return not same.all()

    assert moved(batch)
    assert not moved(replace(batch, mixed=mixed))
    token = batch.tokens.clone()
    token[0, 2] = (token[0, 2] + 1) % 40
    for batch_, changes in ((batch, False), (replace(batch, mixed=mixed), True)):
        base = unroll(head, batch_, features, DEPTH)
        assert (
            unroll(head, replace(batch_, tokens=token), features, DEPTH) != base
        ).any() == changes


def test_a_lost_branch_leaves_the_other_one() -> None:
    head = make("autoregressive", GATED)
    gates, batch = Gates(head), batch_of(head)
    features = features_of(head, batch)
    shifted = type(features)(features.hidden, features.keys + 1, features.values + 1)

    def hidden(lost: int, given):
        with gates.branches(torch.tensor([lost, 0])):
            return unroll(head, batch, given, DEPTH)

    moved = [hidden(lost, features) != hidden(lost, shifted) for lost in (0, 1, 2)]
    assert [bool(m[0].any()) for m in moved] == [True, False, True]
    assert all(bool(m[1].any()) for m in moved)
    assert len(gates.means()) == DEPTH
    assert not torch.equal(hidden(2, features)[0], hidden(0, features)[0])


def test_a_gate_has_a_floor() -> None:
    head = make("autoregressive", GATED)
    gates = Gates(head)
    activation = head.layers[0].delta.activation
    gates.floor = 0.5
    assert activation(torch.tensor([-50.0, 50.0])).tolist() == pytest.approx([0.5, 1.0])
