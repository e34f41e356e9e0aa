"""What training does to gated branches (KVShot, arXiv 2604.26412): floors, dropout, watching.

h = n + g * W (o - n): n is the head's own attention, o the target's KV. Works through forward
hooks, so heads know nothing of it. Letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specstack.models.heads.sources import GatedLayer


class Gates:
    """The gates of a head; without any it does nothing."""

    def __init__(self, head: nn.Module) -> None:
        self.floor = 0.0
        """Least value of a gate."""
        self._own_scale: Tensor | None = None
        self._kv_scale: Tensor | None = None
        self._means: list[Tensor] = []
        self._layers = [layer for layer in head.modules() if isinstance(layer, GatedLayer)]
        for layer in self._layers:
            layer.delta.activation.register_forward_hook(self._on_gate)
            layer.self_attn.register_forward_hook(self._on_own)

    @contextmanager
    def branches(self, lost: Tensor) -> Iterator[None]:
        """Leave out a branch per sequence, [B]: 0 none, 1 the target's KV, 2 the own one."""
        self._kv_scale, self._own_scale = ((lost != side)[:, None, None] for side in (1, 2))
        self._means = []
        try:
            yield
        finally:
            self._kv_scale = self._own_scale = None

    def means(self) -> list[float]:
        """Mean gate per step of the last unrolling, before floor and dropout. Host sync."""
        if not self._layers:
            return []
        steps = torch.stack(self._means).view(-1, len(self._layers))
        return steps.mean(dim=1).tolist()

    def _on_gate(self, module: nn.Module, inputs: Any, gate: Tensor) -> Tensor:
        self._means.append(gate.detach().float().mean())
        gate = self.floor + (1 - self.floor) * gate
        return gate if self._kv_scale is None else gate * self._kv_scale

    def _on_own(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> Any:
        return output if self._own_scale is None else (output[0] * self._own_scale, output[1])
