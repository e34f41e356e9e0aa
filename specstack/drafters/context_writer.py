"""Writes a block head's context straight into its pool: one launch for all layers, for GPUs.

The same as `BlockHead.context` and `DraftPool.write`, which a CPU uses: there the head's linears
are packed. Weights are stacked once, so the head must not be trained any more. Letters: T tokens,
D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specstack.drafters.draft_pool import DraftPool
from specstack.models.heads.block import BlockHead
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.layers import DraftLayer
from specstack.models.heads.sources import KvSum, TargetKv
from specstack_kernels.ops import context_kv, mix_kv, sum_kv

Maps = tuple[Tensor | None, Tensor | None, Tensor, Tensor]
"""Of keys and values: down (None: diagonal maps), then up."""


class ContextWriter:
    """Knows the weights that make context of features."""

    def __init__(self, head: BlockHead, pool: DraftPool) -> None:
        self._head, self._pool = head, pool
        target, context = head.config.target, head.config.context
        layers = [cast(DraftLayer, layer) for layer in head.layers]
        attention = [layer.self_attn for layer in layers]
        self._eps = target.rms_norm_eps
        self._own = (
            _stacked(layer.input_layernorm for layer in layers),
            _stacked(own.k_proj for own in attention),
            _stacked(own.v_proj for own in attention),
            _stacked(own.k_norm for own in attention) if target.qk_norm else None,
        )
        views = [cast(TargetKv, view) for view in head.target_kv]
        sums = [cast(KvSum, one) for one in head.kv_sum]
        self._mix: tuple[Tensor, Tensor] | None = None
        self._is_derotated = context.kv_mix == "linear_derotated"
        if views and not sums and context.kv_mix != "paired":
            self._mix = (_stacked(v.k_mix for v in views), _stacked(v.v_mix for v in views))
        self._maps: Maps | None = None
        if sums and context.sum_rank == 0:
            ups = (_stacked(one.k_map for one in sums), _stacked(one.v_map for one in sums))
            self._maps = (None, None, *ups)
        elif sums:
            maps = [(cast(nn.Sequential, x.k_map), cast(nn.Sequential, x.v_map)) for x in sums]
            self._maps = (
                _stacked(k_map[0] for k_map, _ in maps),
                _stacked(v_map[0] for _, v_map in maps),
                _stacked(k_map[1] for k_map, _ in maps),
                _stacked(v_map[1] for _, v_map in maps),
            )

    def write(
        self,
        features: TargetFeatures,
        positions: Int[Tensor, " T"],
        fused: Float[Tensor, "T D"] | None,
        kv_slots: Int[Tensor, " T"],
        is_kept: Bool[Tensor, " T"],
    ) -> None:
        """Keep the context of tokens where `is_kept`. Host sync: none."""
        rotation = self._head.rotary(positions)
        angles = rotation.cos[:, 0], rotation.sin[:, 0]
        where = kv_slots, is_kept, self._pool.keys, self._pool.values
        keys, values, scale = features.keys, features.values, rotation.scale
        if fused is not None:
            context_kv(fused, *self._own, *angles, *where, eps=self._eps)
        if self._maps is not None:
            assert keys is not None
            assert values is not None
            sum_kv(keys, values, *self._maps, *angles, *where, scale=scale)
        elif self._mix is not None:
            assert keys is not None
            assert values is not None
            derotated = self._is_derotated
            mix_kv(keys, values, *self._mix, *angles, *where, is_derotated=derotated, scale=scale)
        elif fused is None:  # the target's own layers, as they are
            self._pool.write(kv_slots, self._head.context(features, positions), is_kept)


def _stacked(modules: Iterable[nn.Module]) -> Tensor:
    """Weights as one tensor, of which the modules' own become views: nothing is kept twice."""
    found = list(modules)
    stack = torch.stack([cast(Tensor, module.weight) for module in found])
    for module, weight in zip(found, stack, strict=True):
        cast(Tensor, module.weight).data = weight
    return stack
