"""The block drafter: one pass of a head over [anchor, MASK, ..] gives every depth.

After DFlash (arXiv 2602.06036) and JetFlow (2606.18394). The anchor is the bonus token; the
context are the committed tokens, all strictly before it. What makes a branch depend on its own
tokens: nothing (marginals), a corrector (`conditioned`), or a second pass over the first tree
(`refresh`). Letters: B requests, L context columns, Q slots of a block, K depths, S slots of
requests, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from specstack.drafters.base import DraftRuntime
from specstack.drafters.committed_layout import CommittedLayout
from specstack.drafters.conditioned import Corrected, Marginals, correction_table
from specstack.drafters.context_writer import ContextWriter
from specstack.drafters.draft_pool import DraftPool
from specstack.drafters.head_drafter import HeadDrafter
from specstack.drafters.refresh import Refresh
from specstack.models.heads.block import BlockHead, block_tokens
from specstack.models.heads.layers import LayerKV, PagedKV
from specstack.models.heads.masks import block_mask
from specstack.types import CommittedTokens, DraftBatch, DraftProposal

CANDIDATES = 64


class BlockDrafter(HeadDrafter):
    """Keeps the head's context per KV slot."""

    def __init__(
        self,
        checkpoint: str,
        max_depth: int,
        candidates: int = CANDIDATES,
        *,
        conditioned: bool = True,
        **options: Any,
    ) -> None:
        """As `HeadDrafter`.

        Args:
            candidates: tokens per depth, the best without correction, that a corrector re-ranks.
            conditioned: False drafts from the marginals, whatever the checkpoint could add.
        """
        super().__init__(checkpoint, max_depth, **options)
        if max_depth >= self.config.block_size:
            raise ValueError(
                f"max_depth {max_depth} is beyond block_size {self.config.block_size}, which "
                "counts the anchor"
            )
        self._candidates = candidates
        self._conditioning = self.config.conditioning.kind if conditioned else "none"
        if self.draws and self._conditioning == "refresh":
            raise ValueError("a second pass chooses drafts again, which drawn ones cannot follow")
        self._head: BlockHead
        self._pool: DraftPool
        self._writer: ContextWriter | None = None
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
        if self._pool.is_paged:
            self._writer = ContextWriter(self._head, self._pool)
        if self._head.corrector is not None and self._conditioning != "none":
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
        features, positions = committed.features, committed.positions
        fused, is_kept = self._head.fuse(features), committed.requests >= 0
        if self._writer is not None:
            self._writer.write(features, positions, fused, committed.kv_slots, is_kept)
        else:
            layers = self._head.context(features, positions, fused)
            self._pool.write(committed.kv_slots, layers, is_kept)
        if fused is not None and self._head.is_seeded:
            slots = committed.batch.slot_index
            last = CommittedLayout.of(committed).last(fused, self._seeds[slots])
            self._seeds[slots] = last

    @torch.no_grad()
    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        """Propose what the tree can need of the budget. Host sync: none."""
        context = self._pool.context(batch.kv_slots, batch.seq_lens)
        depth = min(self._max_depth, self.search.depth(draft_budget))
        hidden = self._draft(batch, context, depth)
        head, choice = self._head, self.choice(batch, draft_budget)
        if self._corrections is not None:
            return self.expand(
                Corrected(
                    head, hidden, batch.bonus_tokens, self._token_ids, choice, self._candidates,
                    self._corrections,
                ),
                draft_budget,
            )  # fmt: skip
        marginals = Marginals(head, hidden, self._token_ids, choice)
        if self.search.is_plain and not self.draws:
            proposal = marginals.best(draft_budget)
        else:
            proposal = self.expand(marginals, draft_budget)
        if self._conditioning != "refresh":
            return proposal
        columns = self._pool.num_mask_columns(batch.kv_slots)
        refresh = Refresh(head, self._token_ids, self._max_depth, columns)
        width = self.search.width(draft_budget)
        return refresh(proposal, batch, context, draft_budget, width)

    def _draft(
        self, batch: DraftBatch, context: Sequence[LayerKV | PagedKV], depth: int
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
            self._pool.num_mask_columns(batch.kv_slots),
            config.mask,
        )
        seed = None
        if seeded:
            seed = self._seeds[batch.slot_index][:, None].expand(-1, num_slots, -1)
        hidden: Tensor = self._head(tokens, positions, context, mask, seed)
        return hidden[:, first : first + depth]
