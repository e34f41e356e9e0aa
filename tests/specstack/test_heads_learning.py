"""Gradient reaches every weight, and a tiny head learns one sequence by heart at every depth."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.block import BlockHead, block_tokens
from specstack.models.heads.layers import join
from specstack.models.heads.masks import block_mask, ttt_context_mask, ttt_mask
from specstack.models.heads.testing import (
    GATED_LINEAR,
    HIDDEN,
    KV,
    KV_LINEAR,
    SUM_LOW_RANK,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)

DEPTH = 3
MARKOV = {"kind": "markov", "rank": 16}
GRU = {"kind": "gru", "rank": 4}
WIDE = {"hidden_size": 64, "vocab_size": 64, "head_dim": 16}


def block_logits(head, tokens, features):
    """Logits of the drafts of every block and their tokens, [A, DEPTH, W] and [A, DEPTH]."""
    anchors = torch.arange(int(head.is_seeded), len(tokens) - DEPTH)[None]
    num_anchors, num_slots = anchors.shape[1], head.config.num_slots
    places = anchors[0][:, None] + torch.arange(DEPTH + 1)  # [A, DEPTH + 1]
    labels, parents = tokens[places[:, 1:]], tokens[places[:, :-1]]
    masked, places = block_tokens(parents[:, 0], num_slots), places[:, :num_slots]
    length = torch.tensor([len(tokens)])
    mask = block_mask(anchors, length, num_slots, len(tokens), head.config.mask)
    context = head.context(features, torch.arange(len(tokens))[None])
    seed = None
    if head.is_seeded:
        seed = head.fuse(features)[:, anchors[0] - 1].repeat_interleave(num_slots, dim=1)
    hidden = head(masked.reshape(1, -1), places.reshape(1, -1), context, mask, seed)
    hidden = hidden.unflatten(1, (num_anchors, num_slots))[0, :, -DEPTH:]
    if head.corrector is None:
        return head.logits(hidden), labels
    return head.logits(hidden, parents, head.path_states(parents)), labels


def unrolled_logits(head, tokens, features):
    """The same of the autoregressive form, by the training-time test."""
    num_inputs = len(tokens) - DEPTH - 1
    length, places = torch.tensor([num_inputs]), torch.arange(num_inputs)[None]
    hidden = head.fuse(features)[:, :num_inputs]
    context = head.context(features, torch.arange(len(tokens))[None])
    prefix, logits, labels = None, [], []
    for step in range(DEPTH):
        mask = own_mask = ttt_mask(length, num_inputs, step)
        if context is not None:
            mask = ttt_context_mask(length, num_inputs, len(tokens), step)
        places = places + 1
        self_mask = own_mask if head.is_gated else None
        hidden, own = head(tokens[places], hidden, places, prefix, context, mask, self_mask)
        prefix = own if prefix is None else list(map(join, prefix, own))
        logits.append(head.logits(hidden)[0])
        labels.append(tokens[places[0] + 1])
    return torch.stack(logits, dim=1), torch.stack(labels, dim=1)


HEADS = {
    "block": (BlockHead, "block", HIDDEN, {"conditioning": MARKOV}),
    "block_gru": (BlockHead, "block", HIDDEN, {"conditioning": GRU, "mask": "bidirectional"}),
    "block_table": (BlockHead, "block", KV, {"conditioning": {**GRU, "parent": "table"}}),
    "block_sum": (BlockHead, "block", SUM_LOW_RANK, {}),
    "seeded": (BlockHead, "block", HIDDEN, {"slots": "seeded"}),
    "seeded_sum": (BlockHead, "block", SUM_LOW_RANK, {"slots": "seeded", "conditioning": GRU}),
    "autoregressive": (AutoregressiveHead, "autoregressive", HIDDEN, {"extra_norms": True}),
    "autoregressive_kv": (AutoregressiveHead, "autoregressive", KV_LINEAR, {}),
    "autoregressive_gated": (AutoregressiveHead, "autoregressive", GATED_LINEAR, {}),
}


def make(name: str, dtype=torch.float64, **fields):
    kind, form, context, own = HEADS[name]
    config = tiny_config(form, context, **own, **fields)
    return kind(config, random_tables(config, dtype))


def run(head, tokens, features):
    forward = block_logits if isinstance(head, BlockHead) else unrolled_logits
    return forward(head, tokens, features)


@pytest.mark.parametrize("name", HEADS)
def test_gradient_reaches_every_weight(name: str) -> None:
    torch.manual_seed(0)
    head = make(name)
    randomise(head)
    logits, labels = run(head, torch.randint(40, (9,)), random_features(head.config, 1, 9))
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    silent = [n for n, p in head.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
    assert not head.embedding.requires_grad
    assert not head.lm_head.weight.requires_grad


@pytest.mark.parametrize("name", ["block", "seeded", "autoregressive"])
def test_a_tiny_head_learns_a_sequence_by_heart(name: str) -> None:
    torch.manual_seed(0)
    head = make(name, torch.float32, num_layers=1, intermediate_size=128, target=WIDE)
    tokens = torch.randint(WIDE["vocab_size"], (40,))
    features = random_features(head.config, 1, 40, dtype=torch.float32)
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(200):
        logits, labels = run(head, tokens, features)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        logits, labels = run(head, tokens, features)
    correct = (logits.argmax(-1) == labels).cumprod(dim=1)  # [A, DEPTH]
    reached = torch.cat([torch.tensor([len(correct)]), correct.sum(0)])
    alphas = (reached[1:] / reached[:-1]).tolist()
    assert min(alphas) > 0.95, alphas
