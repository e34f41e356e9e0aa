"""Masks against their sentences, and what they hide from a head: perturb it, nothing moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specstack.models.heads.block import BlockHead
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.masks import block_mask, tree_mask, ttt_context_mask, ttt_mask
from specstack.models.heads.testing import (
    HIDDEN,
    KV_DEROTATED,
    KV_LINEAR,
    SUM,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)


@pytest.mark.parametrize("kind", ["bidirectional", "tree_causal"])
def test_a_block_sees_the_context_before_its_anchor_and_itself(kind: str) -> None:
    anchors, num_context, size, slots = torch.tensor([[0, 3, -1], [5, 2, 4]]), [6, 3], 3, 7
    mask = block_mask(anchors, torch.tensor(num_context), size, slots, kind)
    assert mask.shape == (2, 9, 16)
    for b in range(2):
        for row in range(9):
            block, slot = divmod(row, size)
            for j in range(slots):
                assert mask[b, row, j] == (j < anchors[b, block] and j < num_context[b])
            for column in range(9):
                other, at = divmod(column, size)
                causal = kind == "bidirectional" or at <= slot
                assert mask[b, row, slots + column] == (other == block and causal)


def test_a_node_sees_live_context_and_its_ancestors() -> None:
    ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    mask = tree_mask(ancestors, torch.tensor([2]), 4)
    assert mask[0, :, :4].tolist() == [[True, True, False, False]] * 3
    assert torch.equal(mask[..., 4:], ancestors)


def test_an_unrolled_input_sees_true_inputs_and_its_own_chain() -> None:
    lens, inputs, slots, step = [3, 4], 4, 6, 2
    plain = ttt_mask(torch.tensor(lens), inputs, step)
    context = ttt_context_mask(torch.tensor(lens), inputs, slots, step)
    assert plain.shape == (2, 4, 12)
    assert context.shape == (2, 4, 18)
    for b in range(2):
        for i in range(inputs):
            live = i < lens[b]
            for j in range(slots):
                assert context[b, i, j] == (live and j <= i)
            for m in range(step + 1):
                for j in range(inputs):
                    own = live and j == i
                    assert context[b, i, slots + m * inputs + j] == own
                    assert plain[b, i, m * inputs + j] == ((live and j <= i) if m == 0 else own)


def run(head: BlockHead, tokens, features, anchors, num_context):
    """Hidden states of the blocks of one sequence, [A, S, D]."""
    size, slots = head.config.block_size, num_context
    anchors = torch.tensor([anchors])
    mask = block_mask(anchors, torch.tensor([num_context]), size, slots, head.config.mask)
    positions = (anchors[..., None] + torch.arange(size)).flatten(1)
    context = head.context(features, torch.arange(slots)[None])
    return head(tokens.flatten()[None], positions, context, mask).unflatten(1, (-1, size))[0]


def changed(features: TargetFeatures, token: int) -> TargetFeatures:
    """Other features of one token."""
    fields = {}
    for name in ("hidden", "keys", "values"):
        if (tensor := getattr(features, name)) is not None:
            fields[name] = tensor.clone()
            fields[name][0, token] += 1
    return replace(features, **fields)


@pytest.fixture(params=["bidirectional", "tree_causal"])
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("context", [HIDDEN, KV_LINEAR, KV_DEROTATED, SUM], ids=str)
def test_a_block_head_depends_on_exactly_what_its_mask_shows(context, kind) -> None:
    torch.manual_seed(0)
    config = tiny_config("block", context, mask=kind)
    head = BlockHead(config, random_tables(config))
    randomise(head)
    anchors, num_context, size = [2, 5], 7, config.block_size
    tokens = torch.full((2, size), config.mask_token_id)
    tokens[:, 0] = torch.tensor([7, 9])
    features = random_features(config, 1, num_context)
    base = run(head, tokens, features, anchors, num_context)
    for token in range(num_context):
        moved = run(head, tokens, changed(features, token), anchors, num_context) != base
        for block, anchor in enumerate(anchors):
            assert moved[block].any(-1).all() == (token < anchor)
            assert moved[block].any() == (token < anchor)
    for slot in range(size):
        other = tokens.clone()
        other[0, slot] = 30
        moved = (run(head, other, features, anchors, num_context) != base).any(-1)
        assert not moved[1].any()
        first = 0 if kind == "bidirectional" else slot
        assert moved[0].tolist() == [at >= first for at in range(size)]


@pytest.mark.parametrize("context", [HIDDEN, KV_LINEAR, SUM], ids=str)
def test_many_blocks_in_one_pass_equal_one_block_with_its_prefix(context, kind) -> None:
    """Training equals serving: features from the anchor on do not exist there."""
    torch.manual_seed(1)
    config = tiny_config("block", context, mask=kind)
    head = BlockHead(config, random_tables(config))
    randomise(head)
    anchors, tokens = [0, 3, 6], torch.tensor([[5, -1, -1, -1], [6, -1, 8, -1], [7, -1, -1, -1]])
    features = random_features(config, 1, 7)
    together = run(head, tokens, features, anchors, 7)
    for block, anchor in enumerate(anchors):
        prefix = features.index((slice(None), slice(anchor)))
        alone = run(head, tokens[block : block + 1], prefix, [anchor], anchor)
        torch.testing.assert_close(alone[0], together[block])


def test_refreshed_nodes_depend_on_context_and_ancestors_only() -> None:
    """The block head over a tree's real tokens: root 0, its children 1 and 2, 3 below 1."""
    torch.manual_seed(0)
    config = tiny_config("block", SUM, conditioning={"kind": "refresh"})
    head = BlockHead(config, random_tables(config))
    randomise(head)
    ancestors = torch.eye(4, dtype=torch.bool)[None]
    for node, seen in ((1, [0]), (2, [0]), (3, [0, 1])):
        ancestors[0, node, seen] = True
    mask = tree_mask(ancestors, torch.tensor([2]), 3)  # one context slot is padding
    features, positions = random_features(config, 1, 3), torch.tensor([[2, 3, 3, 4]])

    def nodes(tokens, features):
        context = head.context(features, torch.arange(3)[None])
        return head(torch.tensor([tokens]), positions, context, mask)[0]

    base = nodes([5, 6, 7, 8], features)
    for node in range(4):
        tokens = [5, 6, 7, 8]
        tokens[node] = 30
        moved = (nodes(tokens, features) != base).any(-1)
        assert moved.tolist() == ancestors[0, :, node].tolist()
    for token, seen in enumerate([True, True, False]):
        assert (nodes([5, 6, 7, 8], changed(features, token)) != base).any(-1).all() == seen
