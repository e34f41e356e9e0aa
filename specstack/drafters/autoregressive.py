"""The autoregressive drafter: a head fed with its own hidden state, depth by depth (EAGLE, KVShot).

Absorbing runs the head over the inputs (next token, features) of committed tokens and keeps its
KV at the token's slot; the last input of a request gives the distribution after its bonus token.
Proposing runs it over the frontier of each depth under the tree's mask. A prefix that requests
share is shared here, too; the input of its last token carries the next token of whoever computed
it, which costs a little accuracy where another request continues differently. Letters: B requests,
Q inputs, L context columns, P prefix columns, F frontier nodes, D hidden size, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.drafters.base import DraftRuntime
from specstack.drafters.choice import Choice
from specstack.drafters.committed_layout import CommittedLayout, kv_slots_after
from specstack.drafters.draft_pool import DraftPool
from specstack.drafters.expansion import Children, Frontier
from specstack.drafters.head_drafter import HeadDrafter
from specstack.drafters.surroundings import DraftMemory, Surroundings
from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.types import CommittedTokens, DraftBatch, DraftProposal

ABSORB_COLUMNS = 512
"""Inputs per request and pass: bounds the mask of a long prompt."""


class AutoregressiveDrafter(HeadDrafter):
    """Keeps the head's own KV and context per KV slot, and its last hidden state per request."""

    def __init__(self, checkpoint: str, max_depth: int, **options: Any) -> None:
        """As `HeadDrafter`."""
        super().__init__(checkpoint, max_depth, **options)
        self._head: AutoregressiveHead
        self._memory: DraftMemory
        self._last_hidden: Float[Tensor, "S D"]

    def attach(self, runtime: DraftRuntime) -> None:
        """Load the head and make its pools."""
        head = self._head = cast(AutoregressiveHead, self.load(runtime))
        target = self.config.target

        def pool(num_heads: int) -> DraftPool:
            sizes = (self.config.num_layers, runtime.num_kv_slots, num_heads, target.head_dim)
            return DraftPool(*sizes, runtime.device, runtime.dtype)

        reads_kv = self.config.context.source != "hidden"
        context = pool(target.num_kv_heads) if reads_kv else None
        self._memory = DraftMemory(pool(head.num_cache_heads), context, head.is_gated)
        self._last_hidden = torch.zeros(
            runtime.num_slots, target.hidden_size, device=runtime.device, dtype=runtime.dtype
        )

    @torch.no_grad()
    def absorb(self, committed: CommittedTokens) -> None:
        """Run the head over the new inputs. Host sync: none."""
        if self._memory.context is not None:
            layers = self._head.context(committed.features, committed.positions)
            assert layers is not None
            self._memory.context.write(committed.kv_slots, layers, committed.requests >= 0)
        layout = CommittedLayout.of(committed)
        inputs = _Inputs(
            layout.spread(committed.next_tokens),
            layout.spread(self._head.fuse(committed.features)),
            committed.batch.seq_lens,
            layout.num_new(),
            kv_slots_after(committed),
        )
        slots = committed.batch.slot_index
        for start in range(0, layout.num_columns, ABSORB_COLUMNS):
            hidden = self._run(inputs, start, min(start + ABSORB_COLUMNS, layout.num_columns))
            last = (inputs.num_new - 1 - start)[:, None]
            is_here = (last >= 0) & (last < hidden.shape[1])
            row = last.clamp(0, hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[2])
            kept = torch.where(is_here, hidden.gather(1, row)[:, 0], self._last_hidden[slots])
            self._last_hidden[slots] = kept

    def _run(self, inputs: _Inputs, start: int, end: int) -> Float[Tensor, "B Q D"]:
        """Run the head over columns start..end-1 and keep its KV; the hidden states."""
        column = torch.arange(start, end, device=inputs.tokens.device)
        position = inputs.seq_lens[:, None] + column  # of the tokens with the features
        around = self._memory.before_inputs(
            inputs.kv_slots[:, : inputs.kv_slots.shape[1] - inputs.tokens.shape[1] + end],
            inputs.seq_lens + inputs.num_new.clamp(max=start),
            inputs.seq_lens + inputs.num_new,
            end - start,
        )
        alone = torch.eye(end - start, dtype=torch.bool, device=column.device)
        alone = alone.expand(len(position), -1, -1)
        causal = alone.cumsum(dim=1) > 0
        hidden, own = around.forward(
            self._head,
            inputs.tokens[:, start:end],
            inputs.fused[:, start:end],
            position + 1,
            causal if self._memory.context is None else alone,
            causal,
        )
        self._memory.own.write(
            inputs.kv_slots.gather(1, position), own, column < inputs.num_new[:, None]
        )
        return hidden

    @torch.no_grad()
    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        """Propose what the tree can need of the budget. Host sync: none."""
        rollout = _Rollout(
            self._head,
            self._memory.before_drafts(batch.kv_slots, batch.seq_lens),
            self._last_hidden[batch.slot_index][:, None],
            batch.seq_lens,
            self._token_ids,
            self.choice(batch, draft_budget),
        )
        return self.expand(rollout, draft_budget)


@dataclass(frozen=True)
class _Inputs:
    """New inputs of each request, padded."""

    tokens: Int[Tensor, "B Q"]
    fused: Float[Tensor, "B Q D"]
    seq_lens: Int[Tensor, " B"]
    """Before them."""
    num_new: Int[Tensor, " B"]
    kv_slots: Int[Tensor, "B L+Q"]


class _Rollout:
    """Expands a frontier with one pass per depth; M drafts have been run before."""

    def __init__(
        self,
        head: AutoregressiveHead,
        around: Surroundings,
        hidden: Float[Tensor, "B 1 D"],
        seq_lens: Int[Tensor, " B"],
        token_ids: Int[Tensor, " W"] | None,
        choice: Choice,
    ) -> None:
        self._head, self._around, self._hidden = head, around, hidden
        self._seq_lens, self._token_ids, self._choice = seq_lens, token_ids, choice
        self._ancestors = torch.zeros(*hidden.shape[:2], 0, dtype=torch.bool, device=hidden.device)
        """[B F M] of the last frontier."""

    def first(self) -> Children:
        """What follows the bonus token was known when its input was absorbed."""
        return self._children(0)

    def next(self, frontier: Frontier) -> Children:
        """Run the frontier; each node is fed its parent's hidden state."""
        num_nodes = frontier.tokens.shape[1]
        alone = torch.eye(num_nodes, dtype=torch.bool, device=frontier.tokens.device)
        alone = alone.expand(len(frontier.tokens), -1, -1)
        self._ancestors = torch.cat([_rows(self._ancestors, frontier.parents), alone], dim=-1)
        self._hidden, own = self._around.forward(
            self._head,
            frontier.tokens,
            _rows(self._hidden, frontier.parents),
            (self._seq_lens[:, None] + frontier.depth).expand(-1, num_nodes),
            self._ancestors,
            self._ancestors,
        )
        self._around = self._around.followed_by(own)
        return self._children(frontier.depth)

    def _children(self, depth: int) -> Children:
        return self._choice.of_logits(self._head.logits(self._hidden), self._token_ids, depth)


def _rows(values: Tensor, index: Int[Tensor, "B F"]) -> Tensor:
    """[B G X] to [B F X]."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))
