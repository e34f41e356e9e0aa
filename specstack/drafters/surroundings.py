"""What the inputs of an autoregressive head see before themselves, per source.

hidden: own KV of all earlier inputs. kv: the target's KV of verified tokens, own KV of drafts, and
of the input of the bonus token. gated_delta: own KV in its self-attention, the target's and
that of drafts in its cross-attention. Letters: B requests, Q inputs, R context columns, P prefix
columns, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack.drafters.draft_pool import DraftPool, live_columns
from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.layers import LayerKV, join


@dataclass(frozen=True)
class Surroundings:
    """KV and masks of everything but the inputs themselves."""

    context: list[LayerKV] | None
    """[B R G C] per layer."""
    prefix: list[LayerKV] | None
    """[B P G C] per layer."""
    mask: Bool[Tensor, "B Q R+P"]
    """Q may be 1, for all inputs."""
    self_mask: Bool[Tensor, "B Q P"] | None
    """gated_delta only."""

    def forward(
        self,
        head: AutoregressiveHead,
        tokens: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q D"],
        positions: Int[Tensor, "B Q"],
        inputs: Bool[Tensor, "B Q Q2"],
        self_inputs: Bool[Tensor, "B Q Q2"],
    ) -> tuple[Float[Tensor, "B Q D"], list[LayerKV]]:
        """Run the head; `inputs` and `self_inputs` are the masks' columns after these."""
        self_mask = None if self.self_mask is None else _beside(self.self_mask, self_inputs)
        mask = _beside(self.mask, inputs)
        result: tuple[Tensor, list[LayerKV]] = head(
            tokens, hidden, positions, self.prefix, self.context, mask, self_mask
        )
        return result

    def followed_by(self, own: list[LayerKV]) -> Surroundings:
        """Own KV of drafts behind the prefix; the caller's masks have its columns."""
        if self.prefix is None:
            return replace(self, prefix=own)
        joined = [join(before, new) for before, new in zip(self.prefix, own, strict=True)]
        return replace(self, prefix=joined)


def _beside(before: Bool[Tensor, "B Q1 P"], inputs: Bool[Tensor, "B Q Q2"]) -> Tensor:
    return torch.cat([before.expand(-1, inputs.shape[1], -1), inputs], dim=-1)


@dataclass(frozen=True)
class DraftMemory:
    """The pools of an autoregressive head."""

    own: DraftPool
    """KV of its inputs; that of (token t + 1, features of token t) at the slot of token t."""
    context: DraftPool | None
    """KV from the target's; None for the source hidden."""
    is_gated: bool

    def before_drafts(
        self, kv_slots: Int[Tensor, "B L"], seq_lens: Int[Tensor, " B"]
    ) -> Surroundings:
        """What every draft of a request sees. Host sync: none."""
        is_live = live_columns(seq_lens, kv_slots.shape[1])
        if self.context is None:
            prefix = self.own.read(kv_slots, is_live)
            return Surroundings(None, prefix, is_live[:, None], None)
        context = self.context.read(kv_slots, is_live)
        if self.is_gated:
            # The cross-attention sees the last input alone, whose token is not verified yet.
            is_last = is_live & ~live_columns(seq_lens - 1, kv_slots.shape[1])
            mask = torch.cat([is_live, is_last], dim=1)[:, None]
            prefix = self.own.read(kv_slots, is_live)
            return Surroundings(context, prefix, mask, is_live[:, None])
        last = kv_slots.gather(1, seq_lens[:, None] - 1)
        always = torch.ones_like(last, dtype=torch.bool)
        mask = torch.cat([is_live, always], dim=1)[:, None]
        return Surroundings(context, self.own.read(last, always), mask, None)

    def before_inputs(
        self,
        kv_slots: Int[Tensor, "B L"],
        num_before: Int[Tensor, " B"],
        num_known: Int[Tensor, " B"],
        num_inputs: int,
    ) -> Surroundings:
        """What the inputs of verified tokens `num_before`, .. see. Host sync: none.

        Args:
            num_before: inputs whose own KV is there.
            num_known: tokens whose context is there.
        """
        is_before = live_columns(num_before, kv_slots.shape[1])
        prefix, before = None, is_before[:, None]
        if self.context is None or self.is_gated:
            prefix = self.own.read(kv_slots, is_before)
        if self.context is None:
            return Surroundings(None, prefix, before, None)
        is_known = live_columns(num_known, kv_slots.shape[1])
        ends = num_before[:, None] + torch.arange(1, num_inputs + 1, device=kv_slots.device)
        columns = torch.arange(kv_slots.shape[1], device=kv_slots.device)
        seen = (columns < ends[..., None]) & is_known[:, None]  # [B, Q, R]
        context = self.context.read(kv_slots, is_known)
        if not self.is_gated:
            return Surroundings(context, None, seen, None)
        mask = torch.cat([seen, torch.zeros_like(seen)], dim=-1)
        return Surroundings(context, prefix, mask, before)
