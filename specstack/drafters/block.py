"""The block drafter: one pass of a head over [anchor, MASK, ..] gives every depth.

After DFlash (arXiv 2602.06036) and JetFlow (2606.18394). The anchor is the bonus token; the
context are the committed tokens, all strictly before it. What makes a branch depend on its own
tokens: nothing (marginals), a corrector (`conditioned`), or a second pass over the first tree
(`refresh`). Letters: B requests, L context columns, Q slots of a block, K depths, S slots of
requests, D hidden size.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from specstack.drafters.base import DraftRuntime
from specstack.drafters.committed_layout import CommittedLayout
from specstack.drafters.conditioned import Corrected, Marginals, correction_table
from specstack.drafters.draft_pool import DraftPool, live_columns
from specstack.drafters.expansion import expand
from specstack.drafters.head_drafter import HeadDrafter
from specstack.drafters.refresh import Refresh
from specstack.models.heads.block import BlockHead, block_tokens
from specstack.models.heads.layers import LayerKV
from specstack.models.heads.masks import block_mask
from specstack.types import CommittedTokens, DraftBatch, DraftProposal

CANDIDATES = 64


class BlockDrafter(HeadDrafter):
    """Keeps the head's context per KV slot."""

    def __init__(
        self,
        checkpoint: str,
        max_depth: int,
        width: int | None = None,
        candidates: int = CANDIDATES,
    ) -> None:
        """As `HeadDrafter`.

        Args:
            candidates: tokens per depth, the best without correction, that a corrector re-ranks.
        """
        super().__init__(checkpoint, max_depth, width)
        if max_depth >= self.config.block_size:
            raise ValueError(
                f"max_depth {max_depth} is beyond block_size {self.config.block_size}, which "
                "counts the anchor"
            )
        self._candidates = candidates
        self._head: BlockHead
        self._pool: DraftPool
        self._corrections: Float[Tensor, "W R"] | None = None
        self._seeds: Float[Tensor, "S D"]

    def attach(self, runtime: DraftRuntime) -> None:
        """Load the head and make its pool."""
        self._head = cast(BlockHead, self.load(runtime))
        self._pool = DraftPool(
            self.config.num_layers,
            runtime.num_kv_slots,
            self._head.num_cache_heads,
            self.config.target.head_dim,
            runtime.device,
            runtime.dtype,
        )
        if self._head.corrector is not None:
            self._corrections = correction_table(self._head)
        self._seeds = torch.zeros(
            runtime.num_slots if self._head.is_seeded else 0,
            self.config.target.hidden_size,
            device=runtime.device,
            dtype=runtime.dtype,
        )

    @torch.no_grad()
    def absorb(self, committed: CommittedTokens) -> None:
        """Keep the context of the tokens, and the features of each request's last one.

        Host sync: none.
        """
        fused = self._head.fuse(committed.features)
        layers = self._head.context(committed.features, committed.positions, fused)
        self._pool.write(committed.kv_slots, layers, committed.requests >= 0)
        if fused is not None and self._head.is_seeded:
            slots = committed.batch.slot_index
            last = CommittedLayout.of(committed).last(fused, self._seeds[slots])
            self._seeds[slots] = last

    @torch.no_grad()
    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        """Propose the best `draft_budget` candidates and a chain. Host sync: none."""
        context = self._pool.read(
            batch.kv_slots, live_columns(batch.seq_lens, batch.kv_slots.shape[1])
        )
        hidden = self._draft(batch, context, min(self._max_depth, draft_budget))
        head, width = self._head, self.num_children(draft_budget)
        if self._corrections is not None:
            expander = Corrected(
                head, hidden, batch.bonus_tokens, self._token_ids, width, self._candidates,
                self._corrections,
            )  # fmt: skip
            return expand(expander, self._max_depth, draft_budget)
        marginals = Marginals(head, hidden, self._token_ids, width)
        proposal = expand(marginals, self._max_depth, draft_budget)
        if self.config.conditioning.kind == "none":
            return proposal
        refresh = Refresh(head, self._token_ids, self._max_depth)
        return refresh(proposal, batch, context, draft_budget, width)

    def _draft(
        self, batch: DraftBatch, context: list[LayerKV], depth: int
    ) -> Float[Tensor, "B K D"]:
        """One pass; the hidden states of depths 1, 2, .."""
        # A causal slot does not see the later ones; a bidirectional one was trained to.
        config, seeded = self.config, self._head.is_seeded
        first = 0 if seeded else 1  # the slot of depth 1
        num_slots = depth + first if config.mask == "tree_causal" else config.num_slots
        tokens = block_tokens(batch.bonus_tokens, num_slots)
        positions = batch.seq_lens[:, None] + torch.arange(num_slots, device=tokens.device)
        mask = block_mask(
            batch.seq_lens[:, None],
            batch.seq_lens,
            num_slots,
            batch.kv_slots.shape[1],
            config.mask,
        )
        seed = None
        if seeded:
            seed = self._seeds[batch.slot_index][:, None].expand(-1, num_slots, -1)
        hidden: Tensor = self._head(tokens, positions, context, mask, seed)
        return hidden[:, first : first + depth]
