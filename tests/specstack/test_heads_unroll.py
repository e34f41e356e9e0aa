"""The training-time test of the autoregressive form: unrolling equals drafting step by step."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.layers import LayerKV, join
from specstack.models.heads.masks import ttt_context_mask, ttt_mask
from specstack.models.heads.testing import (
    GATED,
    GATED_LINEAR,
    HIDDEN,
    KV,
    KV_LINEAR,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)

SOURCES = {
    "hidden": HIDDEN,
    "kv": KV,
    "kv_linear": KV_LINEAR,
    "gated": GATED,
    "gated_linear": GATED_LINEAR,
}
STEPS = 3


def append(prefix, own):
    return own if prefix is None else [join(a, b) for a, b in zip(prefix, own, strict=True)]


def unroll(head, tokens, features, steps=STEPS):
    """Hidden states of every input at every step, [steps, Q, D], of one sequence [T]."""
    num_inputs = len(tokens) - steps
    length = torch.tensor([num_inputs])
    hidden = head.fuse(features)[:, :num_inputs]
    context = head.context(features, torch.arange(len(tokens))[None])
    prefix, outputs = None, []
    for step in range(steps):
        mask = own_mask = ttt_mask(length, num_inputs, step)
        if context is not None:
            mask = ttt_context_mask(length, num_inputs, len(tokens), step)
        places = torch.arange(num_inputs)[None] + 1 + step
        self_mask = own_mask if head.is_gated else None
        given = tokens[places], hidden, places
        hidden, own = head(*given, prefix, context, mask, self_mask)
        prefix = append(prefix, own)
        outputs.append(hidden[0])
    return torch.stack(outputs)


def everything(head, context, prefix, num_verified):
    """Masks of a single input: all context, own KV of drafts only where context replaces it."""
    num_prefix = 0 if prefix is None else prefix[0].keys.shape[1]
    self_mask = torch.ones(1, 1, num_prefix + 1, dtype=torch.bool)
    if context is None:
        return self_mask, None
    drafts = self_mask.clone()
    drafts[..., :num_verified] = False
    seen = torch.ones(1, 1, context[0].keys.shape[1], dtype=torch.bool)
    return torch.cat([seen, drafts], dim=-1), self_mask if head.is_gated else None


def draft(head, tokens, features, i, steps=STEPS):
    """Hidden states of `steps` drafts after input i, [steps, D]: one input per pass."""
    prefix, outputs = None, []
    for j in range(i):  # earlier inputs, as verified rounds left them
        known = features.index((slice(None), slice(j + 1)))
        _, own = one_pass(head, tokens, known, j, head.fuse(known)[:, -1:], prefix, j)
        prefix = append(prefix, own)
    known = features.index((slice(None), slice(i + 1)))
    hidden = head.fuse(known)[:, -1:]
    for step in range(steps):
        hidden, own = one_pass(head, tokens, known, i + step, hidden, prefix, i)
        prefix = append(prefix, own)
        outputs.append(hidden[0, 0])
    return torch.stack(outputs)


def one_pass(head, tokens, known, place, hidden, prefix, num_verified):
    context = head.context(known, torch.arange(known_length(known))[None])
    mask, self_mask = everything(head, context, prefix, num_verified)
    position = torch.tensor([[place + 1]])
    return head(tokens[position], hidden, position, prefix, context, mask, self_mask)


def known_length(features):
    return (features.hidden if features.hidden is not None else features.keys).shape[1]


@pytest.mark.parametrize("extra_norms", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_unrolling_all_inputs_equals_drafting_after_each(source: str, extra_norms: bool) -> None:
    torch.manual_seed(0)
    config = tiny_config("autoregressive", SOURCES[source], extra_norms=extra_norms)
    head = AutoregressiveHead(config, random_tables(config))
    randomise(head)
    tokens = torch.randint(config.target.vocab_size, (8,))
    features = random_features(config, 1, 8)
    together = unroll(head, tokens, features)
    for i in range(together.shape[1]):
        alone = draft(head, tokens, features, i)
        torch.testing.assert_close(alone, together[:, i], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("source", SOURCES)
def test_an_unrolled_input_depends_on_exactly_what_its_mask_shows(source: str) -> None:
    torch.manual_seed(0)
    config = tiny_config("autoregressive", SOURCES[source])
    head = AutoregressiveHead(config, random_tables(config))
    randomise(head)
    tokens = torch.randint(config.target.vocab_size, (8,))
    features = random_features(config, 1, 8)
    base = unroll(head, tokens, features)
    num_inputs = base.shape[1]
    for token in range(8):
        other = deepcopy(features)
        for tensor in (other.hidden, other.keys, other.values):
            if tensor is not None:
                tensor[0, token] += 1
        moved = (unroll(head, tokens, other) != base).any(-1)
        expected = [i >= token for i in range(num_inputs)]
        assert moved[-1].tolist() == expected, token
    for place in range(1, 8):
        other = tokens.clone()
        other[place] = (other[place] + 1) % config.target.vocab_size
        moved = (unroll(head, other, features) != base).any(-1)
        for step in range(STEPS):
            for i in range(num_inputs):
                in_chain = i + 1 <= place <= i + 1 + step
                verified = source != "kv" and source != "kv_linear" and place <= i
                assert moved[step, i] == (in_chain or verified)


def test_own_keys_of_a_gated_head_have_twice_the_heads() -> None:
    config = tiny_config("autoregressive", GATED)
    head = AutoregressiveHead(config, random_tables(config))
    kv = LayerKV(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))
    assert head.num_cache_heads == 4
    halves = [kv.heads(0, 2), kv.heads(2, 4)]
    assert torch.equal(join(*halves, dim=-2).keys, kv.keys)
