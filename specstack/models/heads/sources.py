"""Context sources: how the target's hidden states, keys and values reach a draft layer.

`TapFusion` for hidden states (DFlash, arXiv 2602.06036; EAGLE-3, 2503.01840; every tap is
normalised first), `TargetKv` for keys and values (KVShot, 2604.26412), and two ways to have both:
`GatedLayer` (KVShot, equations 6-9) and `KvSum` (ours). Letters: *T token axes, B sequences,
Q queries, n and m tapped layers (hidden, KV), D hidden size, G KV heads, C head size.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from specstack.models.heads.config import HeadConfig
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.layers import Attention, DraftLayer, LayerKV, PagedKV, join
from specstack.models.heads.rotary import Rotation

GATE_BIAS = 3.0
"""Gates start at sigmoid(3) = 0.95, so that they pass gradient from the first step on."""


class TapFusion(nn.Module):
    """n tapped hidden states to one vector: RMSNorm(W [norm_1(h_1); ..; norm_n(h_n)])."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, eps = config.target.hidden_size, config.target.rms_norm_eps
        num_taps = len(config.context.target_layers)
        self.tap_norms = nn.ModuleList(nn.RMSNorm(hidden, eps=eps) for _ in range(num_taps))
        self.proj = nn.Linear(num_taps * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=eps)

    def forward(self, taps: Float[Tensor, "*T n D"]) -> Float[Tensor, "*T D"]:
        normed = [norm(taps[..., i, :]) for i, norm in enumerate(self.tap_norms)]
        return self.norm(self.proj(torch.cat(normed, dim=-1)))


class TargetKv(nn.Module):
    """One draft layer's view of the target's keys and values."""

    def __init__(self, config: HeadConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.mix = layer, config.context.kv_mix
        width = config.target.num_kv_heads * config.target.head_dim
        if self.mix != "paired":
            num_taps = len(config.context.kv_layers)
            self.k_mix = nn.Linear(num_taps * width, width, bias=False)
            self.v_mix = nn.Linear(num_taps * width, width, bias=False)

    def forward(self, features: TargetFeatures, rotation: Rotation) -> LayerKV:
        """Return KV at the tokens' positions; `rotation` is theirs."""
        if features.keys is None or features.values is None:
            raise ValueError("this head reads the target's keys and values; the features have none")
        keys, values = features.keys, features.values
        if self.mix == "paired":
            return LayerKV(keys[..., self.layer, :, :], values[..., self.layer, :, :])
        if self.mix == "linear_derotated":
            keys = rotation.invert(keys.flatten(-3, -2)).view_as(keys)
        mixed = LayerKV(_mixed(self.k_mix, keys), _mixed(self.v_mix, values))
        return LayerKV(rotation.apply(mixed.keys), mixed.values)


def target_views(config: HeadConfig) -> nn.ModuleList:
    """One `TargetKv` per draft layer; none for the source hidden."""
    num_views = 0 if config.context.source == "hidden" else config.num_layers
    return nn.ModuleList(TargetKv(config, layer) for layer in range(num_views))


def _mixed(mix: nn.Linear, taps: Float[Tensor, "*T m G C"]) -> Float[Tensor, "*T G C"]:
    return mix(taps.flatten(-3)).unflatten(-1, taps.shape[-2:])


class KvSum(nn.Module):
    """Adds maps of the target's KV to a layer's own: K + A K_target, V + B V_target.

    Both maps start at zero, so a new head equals the one without them. Keys are mapped in their
    unrotated frame, which keeps relative positions.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width = config.target.num_kv_heads * config.target.head_dim
        self.k_map = _zero_map(width, config.context.sum_rank)
        self.v_map = _zero_map(width, config.context.sum_rank)

    def forward(self, own: LayerKV, target: LayerKV, rotation: Rotation) -> LayerKV:
        unrotated = rotation.invert(target.keys)
        added = self.k_map(unrotated.flatten(-2)).view_as(unrotated)
        return LayerKV(
            own.keys + rotation.apply(added),
            own.values + self.v_map(target.values.flatten(-2)).view_as(target.values),
        )


def _zero_map(width: int, rank: int) -> nn.Module:
    if rank == 0:
        return _Diagonal(width)
    up = nn.Linear(rank, width, bias=False)
    nn.init.zeros_(up.weight)
    return nn.Sequential(nn.Linear(width, rank, bias=False), up)


class _Diagonal(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GatedDelta(nn.Module):
    """h = n + g * W_Delta (o - n), g = sigmoid(W_g [n; o; o - n] + b_g); W_Delta starts at zero."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(3 * hidden, hidden)
        nn.init.constant_(self.gate.bias, GATE_BIAS)
        self.activation = nn.Sigmoid()
        """A module, so that training can watch the gates with a forward hook."""
        self.proj = nn.Linear(hidden, hidden, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(
        self, own: Float[Tensor, "B Q D"], cross: Float[Tensor, "B Q D"]
    ) -> Float[Tensor, "B Q D"]:
        delta = cross - own
        gate = self.activation(self.gate(torch.cat([own, cross, delta], dim=-1)))
        return own + gate * self.proj(delta)


class GatedLayer(DraftLayer):
    """A draft layer that also attends the target's KV and gates the difference (KVShot).

    Own KV has 2 G heads: G of the self-attention, then G of the draft positions' W_K^c, W_V^c.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.num_kv_heads = config.target.num_kv_heads
        self.cross_attn = Attention(config.target)
        self.delta = GatedDelta(config.target.hidden_size)

    def forward(
        self,
        x: Float[Tensor, "B Q D"],
        rotation: Rotation,
        context: LayerKV | PagedKV | None,
        prefix: LayerKV | None,
        mask: Bool[Tensor, "B Q K"],
        self_mask: Bool[Tensor, "B Q K"] | None,
    ) -> tuple[Float[Tensor, "B Q D"], LayerKV]:
        """As `DraftLayer`; `self_mask` covers prefix and inputs, `mask` the context before them."""
        if self_mask is None:
            raise ValueError("a gated_delta head needs self_mask beside mask")
        assert not isinstance(context, PagedKV), "autoregressive heads gather their context"
        middle, normed = self.num_kv_heads, self.input_layernorm(x)
        earlier = prefix and prefix.heads(0, middle)
        attended, own = self.self_attn(normed, rotation, earlier, self_mask)
        drafts = prefix and prefix.heads(middle, 2 * middle)
        seen = join(context, drafts) if context or drafts else None
        cross, cross_own = self.cross_attn(normed, rotation, seen, mask)
        output = self.after_attention(x, self.delta(attended, cross))
        return output, join(own, cross_own, dim=-2)
