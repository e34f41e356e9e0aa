"""Both forms and all sources against the equations, written as loops over single vectors.

float64; only RoPE's angles are float32 in the heads, so results agree to about 1e-6.
"""

from __future__ import annotations

import math

import pytest
import torch

from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.block import BlockHead
from specstack.models.heads.layers import LayerKV, attend
from specstack.models.heads.testing import (
    GATED,
    GATED_LINEAR,
    HIDDEN,
    KV,
    KV_DEROTATED,
    KV_LINEAR,
    SUM,
    SUM_LOW_RANK,
    random_features,
    random_tables,
    randomise,
    tiny_config,
)

HEADS, KV_HEADS, SIZE, THETA, EPS = 4, 2, 8, 10000.0, 1e-6


def rms(x, module):
    return x / torch.sqrt((x * x).sum() / len(x) + EPS) * module.weight


def rope(x, position):
    out = x.clone()
    half = len(x) // 2
    for i in range(half):
        angle = position * THETA ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def rotated(heads, position):
    return torch.stack([rope(head, position) for head in heads])


def key_value(attention, x, position):
    keys = (attention.k_proj.weight @ x).reshape(KV_HEADS, SIZE)
    keys = torch.stack([rms(key, attention.k_norm) for key in keys])
    return rotated(keys, position), (attention.v_proj.weight @ x).reshape(KV_HEADS, SIZE)


def attention(module, xs, positions, seen, mask):
    """`seen` and the inputs' own (key, value) pairs, in the order of the mask's columns."""
    known = seen + [key_value(module, x, p) for x, p in zip(xs, positions, strict=True)]
    outputs = []
    for row, (x, position) in enumerate(zip(xs, positions, strict=True)):
        queries = (module.q_proj.weight @ x).reshape(HEADS, SIZE)
        heads = []
        for h in range(HEADS):
            query = rope(rms(queries[h], module.q_norm), position)
            group = h // (HEADS // KV_HEADS)
            total, weights = torch.zeros(SIZE, dtype=x.dtype), 0.0
            for column, (key, value) in enumerate(known):
                if mask[row][column]:
                    weight = torch.exp(query @ key[group] / math.sqrt(SIZE))
                    total, weights = total + weight * value[group], weights + weight
            heads.append(total / weights if mask[row].any() else total)
        outputs.append(module.o_proj.weight @ torch.cat(heads))
    return outputs


def finish(layer, xs, attended):
    out = []
    for x, a in zip(xs, attended, strict=True):
        x = x + a
        y = rms(x, layer.post_attention_layernorm)
        gate = layer.mlp.gate_proj.weight @ y
        inner = gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ y)
        out.append(x + layer.mlp.down_proj.weight @ inner)
    return out


def fuse(fusion, taps):
    normed = [rms(tap, norm) for tap, norm in zip(taps, fusion.tap_norms, strict=True)]
    return rms(fusion.proj.weight @ torch.cat(normed), fusion.norm)


def target_kv(config, view, layer, keys, values, position):
    """The layer's view of one token's tapped KV."""
    mix = config.context.kv_mix
    if mix == "paired":
        return keys[layer], values[layer]
    if mix == "linear_derotated":
        keys = torch.stack([rotated(tap, -position) for tap in keys])
    mixed = (view.k_mix.weight @ keys.flatten()).reshape(KV_HEADS, SIZE)
    mixed_values = (view.v_mix.weight @ values.flatten()).reshape(KV_HEADS, SIZE)
    return rotated(mixed, position), mixed_values


def mapped(module, x):
    if hasattr(module, "weight"):
        return module.weight * x
    return module[1].weight @ (module[0].weight @ x)


def block_context(head, i, features, position):
    config, layer = head.config, head.layers[i]
    target = None
    if config.context.source != "hidden":
        keys, values = features.keys[0, position], features.values[0, position]
        target = target_kv(config, head.target_kv[i], i, keys, values, position)
    if config.context.source == "kv":
        return target
    fused = rms(fuse(head.fusion, features.hidden[0, position]), layer.input_layernorm)
    key, value = key_value(layer.self_attn, fused, position)
    if target is None:
        return key, value
    added = mapped(head.kv_sum[i].k_map, rotated(target[0], -position).flatten())
    added_value = mapped(head.kv_sum[i].v_map, target[1].flatten())
    key = key + rotated(added.reshape(KV_HEADS, SIZE), position)
    return key, value + added_value.reshape(KV_HEADS, SIZE)


SOURCES = {
    "hidden": HIDDEN,
    "kv_linear": KV_LINEAR,
    "kv_derotated": KV_DEROTATED,
    "kv_paired": KV,
    "sum": SUM,
    "sum_low_rank": SUM_LOW_RANK,
}


def block_outputs(head, xs, features, positions, mask):
    """From what the slots start from to their final hidden states; three tokens of context."""
    for i, layer in enumerate(head.layers):
        seen = [block_context(head, i, features, position) for position in range(3)]
        normed = [rms(x, layer.input_layernorm) for x in xs]
        xs = finish(layer, xs, attention(layer.self_attn, normed, positions, seen, mask))
    return torch.stack([rms(x, head.norm) for x in xs])


@pytest.mark.parametrize("source", SOURCES)
def test_a_block_pass_is_what_its_equations_say(source: str) -> None:
    torch.manual_seed(0)
    config = tiny_config("block", SOURCES[source])
    head = BlockHead(config, random_tables(config))
    randomise(head)
    features, tokens, positions = random_features(config, 1, 3), [4, -1, -1, 8], [3, 4, 5, 5]
    mask = torch.rand(1, 4, 7) < 0.6
    mask[0, 1] = False  # sees nothing: no attention output, no NaN
    xs = [head.mask_embedding[0] if t < 0 else head.embedding[t] for t in tokens]
    expected = block_outputs(head, xs, features, positions, mask[0])
    context = head.context(features, torch.arange(3)[None])
    found = head(torch.tensor([tokens]), torch.tensor([positions]), context, mask)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    logits = torch.stack([head.lm_head.weight @ x for x in expected])
    torch.testing.assert_close(head.logits(found), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", [s for s in SOURCES if "kv" not in s])
def test_a_seeded_pass_is_what_its_equations_say(source: str) -> None:
    """Every slot has a token or a MASK of its own, and the features of some token."""
    torch.manual_seed(0)
    config = tiny_config("block", SOURCES[source], slots="seeded")
    head = BlockHead(config, random_tables(config))
    randomise(head)
    assert head.mask_embedding.shape == (2, 24)  # of slots 1 and 2; slot 0 is the anchor's
    features, tokens, positions = random_features(config, 1, 3), [4, -2, -1, 8], [3, 4, 5, 5]
    seeds, mask = [2, 2, 0, 1], torch.rand(1, 4, 7) < 0.6
    mask[0, 1] = False
    xs = []
    for token, seed in zip(tokens, seeds, strict=True):
        known = head.mask_embedding[-token - 1] if token < 0 else head.embedding[token]
        fused = fuse(head.fusion, features.hidden[0, seed])
        joined = torch.cat([rms(known, head.embedding_norm), fused])
        xs.append(head.input_proj.weight @ joined)
    expected = block_outputs(head, xs, features, positions, mask[0])
    fused, places = head.fuse(features), torch.arange(3)[None]
    context = head.context(features, places)
    for known, direct in zip(head.context(features, places, fused), context, strict=True):
        assert torch.equal(known.keys, direct.keys)
        assert torch.equal(known.values, direct.values)

    def found(tokens, seeds):
        inputs = torch.tensor([tokens]), torch.tensor([positions]), context, mask
        return head(*inputs, fused[:, seeds])[0]

    torch.testing.assert_close(found(tokens, seeds), expected, rtol=1e-4, atol=1e-5)
    controls = [([4, -1, -2, 8], seeds), (tokens, [2, 0, 2, 1])]  # MASKs or seeds change places
    assert all((found(*other)[1] - expected[1]).abs().max() > 1e-2 for other in controls)


@pytest.mark.parametrize("slots", ["masked", "seeded"])
def test_masked_slots_share_one_mask_and_seeded_ones_have_their_own(slots: str) -> None:
    config = tiny_config("block", HIDDEN, slots=slots, block_size=5)
    head = BlockHead(config, random_tables(config))
    randomise(head)
    is_seeded = slots == "seeded"
    assert len(head.mask_embedding) == (3 if is_seeded else 1)
    context = head.context(random_features(config, 1, 3), torch.arange(3)[None])
    mask = torch.ones(1, 3, 6, dtype=torch.bool)
    seed = torch.ones(1, 3, 24, dtype=torch.float64) if is_seeded else None
    tokens, positions = torch.tensor([[-1, -2, -3]]), torch.full((1, 3), 3)
    first, *others = head(tokens, positions, context, mask, seed)[0]
    assert [torch.allclose(first, other) for other in others] == [not is_seeded] * 2


@pytest.mark.parametrize("slots", ["masked", "seeded"])
def test_a_seed_is_for_seeded_slots_which_need_it(slots: str) -> None:
    config = tiny_config("block", HIDDEN, slots=slots)
    head = BlockHead(config, random_tables(config))
    context = head.context(random_features(config, 1, 3), torch.arange(3)[None])
    inputs = torch.tensor([[4]]), torch.tensor([[3]]), context
    mask, seed = torch.ones(1, 1, 4, dtype=torch.bool), torch.zeros(1, 1, 24, dtype=torch.float64)
    right, wrong = (None, seed) if slots == "masked" else (seed, None)
    with pytest.raises(ValueError, match=r"^seed is for seeded slots, which need it$"):
        head(*inputs, mask, wrong)
    assert head(*inputs, mask, right).shape == (1, 1, 24)


def pairs(kv: LayerKV):
    return list(zip(kv.keys[0], kv.values[0], strict=True))


def gated_layer(layer, xs, positions, context, prefix, mask, self_mask):
    normed = [rms(x, layer.input_layernorm) for x in xs]
    earlier = [(k[:KV_HEADS], v[:KV_HEADS]) for k, v in prefix]
    drafts = [(k[KV_HEADS:], v[KV_HEADS:]) for k, v in prefix]
    own = attention(layer.self_attn, normed, positions, earlier, self_mask)
    cross = attention(layer.cross_attn, normed, positions, context + drafts, mask)
    mixed = []
    for n, o in zip(own, cross, strict=True):
        delta = o - n
        gate = layer.delta.gate.weight @ torch.cat([n, o, delta]) + layer.delta.gate.bias
        mixed.append(n + torch.sigmoid(gate) * (layer.delta.proj.weight @ delta))
    return finish(layer, xs, mixed)


AUTOREGRESSIVE = {
    "hidden": HIDDEN,
    "kv_linear": KV_LINEAR,
    "kv_paired": KV,
    "gated": GATED,
    "gated_linear": GATED_LINEAR,
}


@pytest.mark.parametrize("extra_norms", [False, True])
@pytest.mark.parametrize("source", AUTOREGRESSIVE)
def test_an_autoregressive_pass_is_what_its_equations_say(source, extra_norms) -> None:
    torch.manual_seed(0)
    config = tiny_config("autoregressive", AUTOREGRESSIVE[source], extra_norms=extra_norms)
    head = AutoregressiveHead(config, random_tables(config))
    randomise(head)
    has_context, is_gated = source != "hidden", source.startswith("gated")
    features, slots = random_features(config, 1, 3), 3 if has_context else 0
    tokens, positions = [4, 9], [3, 4]
    hidden = torch.randn(1, 2, config.target.hidden_size, dtype=torch.float64)
    size = (1, 2, head.num_cache_heads, SIZE)
    prefix = [LayerKV(*torch.randn(2, *size, dtype=torch.float64)) for _ in head.layers]
    mask = torch.rand(1, 2, slots + 4) < 0.7
    self_mask = torch.rand(1, 2, 4) < 0.7 if is_gated else None
    xs = []
    for q in range(2):
        embedded = rms(head.embedding[tokens[q]], head.embedding_norm)
        xs.append(head.input_proj.weight @ torch.cat([embedded, hidden[0, q]]))
    for i, layer in enumerate(head.layers):
        seen = []
        for p in range(slots):
            view, keys, values = head.target_kv[i], features.keys[0, p], features.values[0, p]
            seen.append(target_kv(config, view, i, keys, values, p))
        before = pairs(prefix[i])
        if is_gated:
            xs = gated_layer(layer, xs, positions, seen, before, mask[0], self_mask[0])
        else:
            normed = [rms(x, layer.input_layernorm) for x in xs]
            attended = attention(layer.self_attn, normed, positions, seen + before, mask[0])
            xs = finish(layer, xs, attended)
    expected = torch.stack([rms(x, head.recurrent_norm) if extra_norms else x for x in xs])
    context = head.context(features, torch.arange(3)[None])
    inputs = torch.tensor([tokens]), hidden, torch.tensor([positions])
    found, own = head(*inputs, prefix, context, mask, self_mask)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)
    assert own[1].keys.shape == (1, 2, head.num_cache_heads, SIZE)
    logits = torch.stack([head.lm_head.weight @ rms(x, head.norm) for x in expected])
    torch.testing.assert_close(head.logits(found)[0], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["hidden", "gated"])
def test_fused_features_are_what_their_equation_says(source: str) -> None:
    config = tiny_config("autoregressive", AUTOREGRESSIVE[source])
    head = AutoregressiveHead(config, random_tables(config))
    randomise(head)
    features = random_features(config, 2, 3)
    found = head.fuse(features)
    for b in range(2):
        for p in range(3):
            expected = fuse(head.fusion, features.hidden[b, p])
            torch.testing.assert_close(found[b, p], expected, rtol=1e-6, atol=1e-9)


def test_without_hidden_states_every_token_starts_from_the_same_vector() -> None:
    config = tiny_config("autoregressive", KV)
    head = AutoregressiveHead(config, random_tables(config))
    found = head.fuse(random_features(config, 2, 3))
    assert torch.equal(found, head.start_hidden.expand(2, 3, -1))


@pytest.mark.parametrize("form", ["block", "autoregressive"])
def test_features_that_are_missing_are_named(form: str) -> None:
    kind = BlockHead if form == "block" else AutoregressiveHead
    reads_kv, reads_hidden = (tiny_config(form, context) for context in (KV, HIDDEN))
    kv_head, hidden_head = (kind(c, random_tables(c)) for c in (reads_kv, reads_hidden))
    hidden, kv = (random_features(config, 1, 2) for config in (reads_hidden, reads_kv))
    positions = torch.arange(2)[None]
    with pytest.raises(ValueError, match="this head reads the target's keys and values"):
        kv_head.context(hidden, positions)
    with pytest.raises(ValueError, match="this head reads the target's hidden states"):
        _ = hidden_head.context(kv, positions) if form == "block" else hidden_head.fuse(kv)


def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients() -> None:
    queries = torch.randn(1, 3, 4, 8, requires_grad=True)
    keys, values = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(2))
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[0, 1] = False
    found = attend(queries, keys, values, mask)
    assert not found[0, 1].any()
    assert found[0, [0, 2]].all()
    found.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (queries, keys, values))
    assert not queries.grad[0, 1].any()


def test_wrong_masks_and_contexts_are_refused() -> None:
    x = torch.randn(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"^mask has shape \(1, 2, 3\), expected \(1, 2, 2\)$"):
        attend(x, x, x, torch.ones(1, 2, 3, dtype=torch.bool))
    config = tiny_config("autoregressive", GATED)
    head = AutoregressiveHead(config, random_tables(config))
    inputs = torch.tensor([[1]]), torch.zeros(1, 1, 24, dtype=torch.float64), torch.tensor([[0]])
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="self_mask is for gated_delta heads"):
        head(*inputs, None, None, mask)
    with pytest.raises(ValueError, match=r"^context.source hybrid and a context missing$"):
        head(*inputs, None, None, mask, mask)
