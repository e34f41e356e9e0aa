"""Starting from a target: copies of transformers' own layers give these layers' outputs.

The targets' epsilon is tiny, so that normalising twice is normalising once.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.block import BlockHead
from specstack.models.heads.config import HeadConfig, TargetShape
from specstack.models.heads.errors import HeadError
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.initialise import initialise_from_target
from specstack.models.heads.tables import TargetTables
from specstack.models.heads.testing import GATED, SUM, SUM_LOW_RANK, random_features

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-14,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
}
TARGETS = [("llama", rope) for rope in ROPES] + [("qwen3", "default"), ("qwen3", "yarn")]
LENGTH = 6


def make_target(kind: str, rope: str = "default", **sizes):
    torch.manual_seed(0)
    fields = {**SIZES, "rope_parameters": {**ROPES[rope], "rope_theta": 500.0}, **sizes}
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**fields))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def head_config(target, form, context, num_layers=1, **fields):
    shape = TargetShape.from_hf(target.config.to_dict(), name="target")
    return HeadConfig(
        form=form, num_layers=num_layers, block_size=4, context=context, target=shape,
        **{"intermediate_size": 20, **fields},
    )  # fmt: skip


def tables_of(target) -> TargetTables:
    return TargetTables.from_weights(target.state_dict())


def run_target(target, **inputs):
    with torch.no_grad():
        return target.model(**inputs, output_hidden_states=True, use_cache=True)


@pytest.mark.parametrize(("kind", "rope"), TARGETS)
def test_a_block_layer_reproduces_the_targets_first_layer(kind: str, rope: str) -> None:
    """Features and queries are the inputs of layer 0; a token sees those before it and itself."""
    target = make_target(kind, rope)
    config = head_config(target, "block", {"source": "hidden", "target_layers": (0, 1)})
    head = BlockHead(config, tables_of(target))
    initialise_from_target(head, target, [0])
    tokens, positions = torch.randint(40, (1, LENGTH)), torch.arange(LENGTH)[None] + 30
    output = run_target(target, input_ids=tokens, position_ids=positions)
    embedded = target.model.embed_tokens(tokens)
    taps = torch.stack([torch.randn_like(embedded), embedded], dim=-2)
    context = head.context(TargetFeatures(taps), positions)
    before = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1)
    mask = torch.cat([before, torch.eye(LENGTH, dtype=torch.bool)], dim=-1)[None]
    expected = target.model.norm(output.hidden_states[1])
    found = head(tokens, positions, context, mask)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "rope"), TARGETS)
def test_paired_keys_are_those_of_the_targets_cache(kind: str, rope: str) -> None:
    """A layer that reads its own target layer's KV continues a sequence as the target would."""
    target = make_target(kind, rope)
    context = {"source": "kv", "kv_layers": (0,), "kv_mix": "paired"}
    for mix in ("paired", "linear_derotated"):
        layers = (0,) if mix == "paired" else (2, 1, 0)
        context = {"source": "kv", "kv_layers": layers, "kv_mix": mix}
        head = BlockHead(head_config(target, "block", context), tables_of(target))
        initialise_from_target(head, target, [0])
        tokens = torch.randint(40, (1, LENGTH))
        positions = torch.arange(LENGTH)[None]
        output = run_target(target, input_ids=tokens)
        cached = [output.past_key_values.layers[layer] for layer in layers]
        keys = torch.stack([layer.keys for layer in cached], dim=1).permute(0, 3, 1, 2, 4)
        values = torch.stack([layer.values for layer in cached], dim=1).permute(0, 3, 1, 2, 4)
        known = TargetFeatures(None, keys, values).index((slice(None), slice(4)))
        mask = torch.ones(1, 2, 6, dtype=torch.bool).tril(4)
        derived = head.context(known, positions[:, :4])
        found = head(tokens[:, 4:], positions[:, 4:], derived, mask)
        expected = target.model.norm(output.hidden_states[1])[:, 4:]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "rope"), TARGETS)
def test_an_autoregressive_layer_reproduces_a_target_layer(kind: str, rope: str) -> None:
    """Its input is the normalised tap, scaled."""
    target = make_target(kind, rope)
    context = {"source": "hidden", "target_layers": (1, 0)}
    head = AutoregressiveHead(head_config(target, "autoregressive", context), tables_of(target))
    initialise_from_target(head, target, [2], input_scale=3.0)
    taps = torch.randn(1, LENGTH, 2, 24, dtype=torch.float64)
    tokens, positions = torch.randint(40, (1, LENGTH)), torch.arange(LENGTH)[None] + 20
    x = 3 * taps[:, :, 1] / taps[:, :, 1].pow(2).mean(-1, keepdim=True).sqrt()
    causal = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril()
    rotations = target.model.rotary_emb(x, positions)
    layer = target.model.layers[2]
    expected = layer(x, attention_mask=causal[:, None], position_embeddings=rotations)
    hidden = head.fuse(TargetFeatures(taps))
    found, _ = head(tokens, hidden, positions, None, None, causal)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    logits = target.lm_head(target.model.norm(expected))
    torch.testing.assert_close(head.logits(found), logits, rtol=1e-5, atol=1e-4)
    head.logits(found).logsumexp(-1).sum().backward()
    assert head.input_proj.weight.grad[:, :24].abs().min() > 0


@pytest.mark.parametrize(("kind", "rope"), TARGETS)
def test_a_seeded_layer_reproduces_a_target_layer(kind: str, rope: str) -> None:
    """Where a slot starts from its features alone, token by token; then its token is learnt."""
    target = make_target(kind, rope)
    context = {"source": "hidden", "target_layers": (1, 0)}
    config = head_config(target, "block", context, slots="seeded")
    head = BlockHead(config, tables_of(target))
    initialise_from_target(head, target, [2], input_scale=3.0)
    assert torch.allclose(head.mask_embedding, head.embedding.mean(dim=0).expand(2, -1))
    taps = torch.randn(1, LENGTH, 2, 24, dtype=torch.float64)
    tokens, positions = torch.randint(40, (1, LENGTH)), torch.arange(LENGTH)[None] + 20
    tokens[0, 1:3] = torch.tensor([-1, -2])
    x = 3 * taps[:, :, 1] / taps[:, :, 1].pow(2).mean(-1, keepdim=True).sqrt()
    causal = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril()
    rotations = target.model.rotary_emb(x, positions)
    layer = target.model.layers[2]
    expected = layer(x, attention_mask=causal[:, None], position_embeddings=rotations)
    nothing = head.context(TargetFeatures(taps[:, :0]), positions[:, :0])
    seed = head.fuse(TargetFeatures(taps))
    found = head(tokens, positions, nothing, causal, seed)
    torch.testing.assert_close(found, target.model.norm(expected), rtol=1e-5, atol=1e-5)
    head.logits(found).logsumexp(-1).sum().backward()
    assert head.input_proj.weight.grad[:, :24].abs().min() > 0


STRONG = [j for j in range(20) if j not in (3, 8, 9, 15)]


def weaken(mlp, scale: float) -> None:
    """Neurons 3, 8, 9 and 15 say `scale` of what they did."""
    with torch.no_grad():
        for row, weight in ((3, mlp.gate_proj.weight), (8, mlp.up_proj.weight)):
            weight[row] *= scale
        mlp.down_proj.weight[:, [9, 15]] *= scale


def mlp_of(target, size: int):
    """The MLP of a head that starts from the target's last layer."""
    context = {"source": "hidden", "target_layers": (2,)}
    config = head_config(target, "block", context, intermediate_size=size)
    head = BlockHead(config, tables_of(target))
    initialise_from_target(head, target)
    return head.layers[0].mlp


@pytest.mark.parametrize(("size", "is_same"), [(15, False), (16, True), (20, True), (33, True)])
def test_silent_neurons_go_first_and_further_ones_say_nothing(size: int, is_same: bool) -> None:
    target, x = make_target("llama"), torch.randn(7, 24, dtype=torch.float64)
    source = target.model.layers[2].mlp
    weaken(source, 0.0)
    assert torch.allclose(mlp_of(target, size)(x), source(x)) == is_same


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_a_narrower_mlp_has_the_strongest_neurons_in_their_order(scale: float) -> None:
    target = make_target("llama")
    source = target.model.layers[2].mlp
    weaken(source, scale)
    gate, up, down = (p.weight for p in (source.gate_proj, source.up_proj, source.down_proj))
    strength = [float(gate[j].norm() * up[j].norm() * down[:, j].norm()) for j in range(20)]
    kept = sorted(sorted(range(20), key=lambda j: -strength[j])[:16])
    assert (kept == STRONG) == (scale < 1)
    found = mlp_of(target, 16)
    assert torch.equal(found.gate_proj.weight, gate[kept])
    assert torch.equal(found.up_proj.weight, up[kept])
    assert torch.equal(found.down_proj.weight, down[:, kept])


def test_a_wider_mlp_learns_at_once() -> None:
    target, x = make_target("llama"), torch.randn(7, 24, dtype=torch.float64)
    mlp = mlp_of(target, 33)
    assert torch.equal(mlp.gate_proj.weight[:20], target.model.layers[2].mlp.gate_proj.weight)
    assert not mlp.down_proj.weight[:, 20:].any()
    mlp(x).square().sum().backward()
    assert mlp.down_proj.weight.grad.abs().min() > 0


def adopt(head, other) -> list[str]:
    """Copy what both have; return what only `head` has."""
    return head.load_state_dict(other.state_dict(), strict=False).missing_keys


@pytest.mark.parametrize("context", [SUM, SUM_LOW_RANK], ids=["diagonal", "low_rank"])
def test_a_sum_starts_as_the_hidden_only_head_and_learns_at_once(context) -> None:
    target = make_target("qwen3")
    both = {**context, "target_layers": (1, 2), "kv_layers": (1, 2)}
    plain = {"source": "hidden", "target_layers": (1, 2)}
    config = head_config(target, "block", both, num_layers=2)
    head = BlockHead(config, tables_of(target))
    reference = BlockHead(head_config(target, "block", plain, num_layers=2), tables_of(target))
    initialise_from_target(reference, target)
    assert {name.split(".")[0] for name in adopt(head, reference)} == {"kv_sum"}
    features = random_features(config, 1, 4)
    tokens, positions = torch.tensor([[3, -1, -1]]), torch.tensor([[4, 5, 6]])
    mask = torch.ones(1, 3, 7, dtype=torch.bool)
    outputs = [
        h(tokens, positions, h.context(features, torch.arange(4)[None]), mask)
        for h in (head, reference)
    ]
    assert torch.equal(*outputs)
    outputs[0].square().sum().backward()
    outermost = "weight" if context is SUM else "1.weight"
    for add in head.kv_sum:
        for side in (add.k_map, add.v_map):
            assert side.get_parameter(outermost).grad.abs().max() > 0


def test_a_gated_head_starts_as_the_hidden_only_head_and_learns_at_once() -> None:
    target = make_target("qwen3")
    both = {**GATED, "target_layers": (1, 2), "kv_layers": (1, 2)}
    plain = {"source": "hidden", "target_layers": (1, 2)}
    config = head_config(target, "autoregressive", both, num_layers=2)
    head = AutoregressiveHead(config, tables_of(target))
    reference = AutoregressiveHead(
        head_config(target, "autoregressive", plain, num_layers=2), tables_of(target)
    )
    initialise_from_target(head, target)
    initialise_from_target(reference, target)
    adopt(head, reference)
    features = random_features(config, 1, 4)
    tokens, positions = torch.tensor([[3, 4]]), torch.tensor([[3, 4]])
    own = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    mask = torch.cat([torch.ones(1, 2, 4, dtype=torch.bool), own], dim=-1)
    context = head.context(features, torch.arange(4)[None])
    hidden = head.fuse(features)[:, 2:]
    found, _ = head(tokens, hidden, positions, None, context, mask, own)
    expected, _ = reference(tokens, hidden, positions, None, None, own)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    for layer in head.layers:
        assert layer.delta.proj.weight.grad.abs().max() > 0
        assert torch.equal(layer.delta.gate.bias, torch.full((24,), 3.0, dtype=torch.float64))
    for draft, paired in zip(head.layers, (1, 2), strict=True):
        source = target.model.layers[paired].self_attn
        assert torch.equal(draft.cross_attn.k_proj.weight, source.k_proj.weight)


def test_layers_default_to_the_paired_ones_or_the_last() -> None:
    target = make_target("llama")
    paired = {"source": "kv", "kv_layers": (2, 0), "kv_mix": "paired"}
    plain = {"source": "hidden", "target_layers": (2,)}
    for context, layers in ((paired, (2, 0)), (plain, (1, 2))):
        head = BlockHead(head_config(target, "block", context, num_layers=2), tables_of(target))
        initialise_from_target(head, target.state_dict())
        for draft, layer in zip(head.layers, layers, strict=True):
            expected = target.model.layers[layer].mlp.up_proj.weight
            assert torch.equal(draft.mlp.up_proj.weight, expected)
        assert torch.equal(head.norm.weight, target.model.norm.weight)


def test_what_cannot_be_copied_is_refused() -> None:
    target = make_target("llama")
    context = {"source": "hidden", "target_layers": (2,)}
    head = BlockHead(head_config(target, "block", context), tables_of(target))
    initialise_from_target(head, target)
    with pytest.raises(HeadError) as error:
        initialise_from_target(head, make_target("llama", num_key_value_heads=4))
    assert str(error.value).splitlines() == [
        "the head cannot start from this target:",
        "  model.layers.2.self_attn.k_proj.weight has shape (32, 24) in the target, (16, 24) "
        "in the head",
        "  model.layers.2.self_attn.v_proj.weight has shape (32, 24) in the target, (16, 24) "
        "in the head",
    ]
    with pytest.raises(HeadError, match=r"^2 target layers for the 1 of the head$"):
        initialise_from_target(head, target, [0, 1])
    with pytest.raises(HeadError, match=r"model.layers.7.input_layernorm.weight is missing in"):
        initialise_from_target(head, target, [7])
    for bias in ("self_attn.q_proj.bias", "mlp.up_proj.bias"):
        biased = {**target.state_dict(), f"model.layers.2.{bias}": torch.zeros(32)}
        with pytest.raises(HeadError, match=rf"layers.2.{bias} has no place in the head$"):
            initialise_from_target(head, biased)
    gateless = target.state_dict()
    del gateless["model.layers.2.mlp.gate_proj.weight"]
    with pytest.raises(HeadError) as error:
        initialise_from_target(head, gateless)
    assert str(error.value).splitlines()[1:] == [
        "  model.layers.2.mlp.gate_proj.weight is missing in the target"
    ]
