"""A new head starts from layers of its target, which trains far faster than from random weights.

Layers and the last norm are copies, narrower MLPs of the strongest neurons; the fusion passes the
last tap through; where features enter the residual stream (autoregressive heads, seeded slots) they
do so alone (the embedding's half starts at zero: passed through whole, it makes a target with tied
tables repeat the token that is known, and the loss starts far above uniform); cross-attention is
the paired target layer's. Maps of the fusions `sum` and `gated_delta` and correctors keep their
start without effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.block import BlockHead
from specstack.models.heads.config import HeadConfig
from specstack.models.heads.errors import HeadError
from specstack.models.heads.sources import GatedLayer, TapFusion, TargetKv

Weights = Mapping[str, Tensor]


@torch.no_grad()
def initialise_from_target(
    head: BlockHead | AutoregressiveHead,
    target: nn.Module | Weights,
    layers: Sequence[int] | None = None,
    *,
    input_scale: float = 1.0,
) -> None:
    """Start `head` from a transformers causal LM or its state dict (Llama's and Qwen3's names).

    Args:
        layers: target layers, one per draft layer; None takes the paired ones, else the last.
        input_scale: where features enter the residual stream (autoregressive form, seeded slots):
            RMS of the target's residual stream before `layers[0]`. Taps are normalised, and a
            layer's output is sized for the stream it was trained in.

    Raises:
        HeadError: a layer or tensor is missing, or has other shapes than the head's.
    """
    weights = target.state_dict() if isinstance(target, nn.Module) else target
    chosen = _chosen_layers(head.config, layers)
    for i, (layer, draft) in enumerate(zip(chosen, head.layers, strict=True)):
        for name in ("input_layernorm", "self_attn", "post_attention_layernorm"):
            _copy(draft.get_submodule(name), weights, f"model.layers.{layer}.{name}.")
        mlp = _mlp(weights, f"model.layers.{layer}.mlp.", head.config.intermediate_size)
        _copy(draft.get_submodule("mlp"), mlp, f"model.layers.{layer}.mlp.")
        if isinstance(draft, GatedLayer):
            source = _kv_layer(head.config, i)
            _copy(draft.cross_attn, weights, f"model.layers.{source}.self_attn.")
    _copy(head.norm, weights, "model.norm.")
    _start_inputs(head, input_scale)


def _chosen_layers(config: HeadConfig, layers: Sequence[int] | None) -> Sequence[int]:
    if layers is None:
        if config.context.source == "kv" and config.context.kv_mix == "paired":
            return config.context.kv_layers
        return range(config.target.num_layers - config.num_layers, config.target.num_layers)
    if len(layers) != config.num_layers:
        raise HeadError(f"{len(layers)} target layers for the {config.num_layers} of the head")
    return layers


def _kv_layer(config: HeadConfig, i: int) -> int:
    layers = config.context.kv_layers
    return layers[i] if config.context.kv_mix == "paired" else layers[-1]


def _copy(module: nn.Module, weights: Weights, prefix: str) -> None:
    found = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    wanted = module.state_dict()
    lines = [f"{prefix}{name} is missing in the target" for name in wanted if name not in found]
    lines += [f"{prefix}{name} has no place in the head" for name in found if name not in wanted]
    for name in wanted:
        if name in found and found[name].shape != wanted[name].shape:
            has, asks = tuple(found[name].shape), tuple(wanted[name].shape)
            lines.append(f"{prefix}{name} has shape {has} in the target, {asks} in the head")
    if lines:
        raise HeadError("the head cannot start from this target:\n  " + "\n  ".join(lines))
    module.load_state_dict(found)


def _mlp(weights: Weights, prefix: str, size: int) -> Weights:
    """An MLP of `size` neurons: the target's strongest; further ones say nothing at first."""
    found = {name: value for name, value in weights.items() if name.startswith(prefix)}
    names = [f"{prefix}{name}_proj.weight" for name in ("gate", "up", "down")]
    if any(name not in found for name in names):
        return found
    gate, up, down = (found[name] for name in names)
    if size > len(gate):
        more = torch.randn(2, size - len(gate), gate.shape[1], device=gate.device) * gate.std()
        gate, up = torch.cat([gate, more[0]]), torch.cat([up, more[1]])
        down = torch.cat([down, down.new_zeros(len(down), size - down.shape[1])], dim=1)
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = strength.topk(size).indices.sort().values
    return found | dict(zip(names, (gate[kept], up[kept], down[:, kept]), strict=True))


def _start_inputs(head: BlockHead | AutoregressiveHead, input_scale: float) -> None:
    if isinstance(head, BlockHead):
        head.mask_embedding.copy_(head.embedding.float().mean(dim=0))
    if isinstance(head, AutoregressiveHead) or head.is_seeded:
        _pass_last(head.input_proj)
        head.input_proj.weight.mul_(input_scale)
    for module in head.modules():
        if isinstance(module, TapFusion):
            _pass_last(module.proj)
        elif isinstance(module, TargetKv) and module.mix != "paired":
            _pass_last(module.v_mix)
            if module.mix == "linear_derotated":  # KVShot's mix rotates twice: no copy exists
                _pass_last(module.k_mix)


def _pass_last(linear: nn.Linear) -> None:
    """Make a projection of concatenated parts return the last part."""
    width = linear.out_features
    linear.weight.zero_()
    linear.weight[:, -width:] = torch.eye(width)
