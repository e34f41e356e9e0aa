"""The training objective as one module: a batch and the target's features in, losses out.

Losses are sums, divided by a total that the caller knows, so that forwards of one step and
processes can be added up. Letters: B sequences, L tokens, A anchors, S outputs per anchor, N rows,
D hidden size, R rank, K depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from specstack.models.heads.block import BlockHead
from specstack.models.heads.checkpoint import Head
from specstack.models.heads.features import TargetFeatures
from specstack.training.batches import Batch
from specstack.training.block_pass import block_hidden, slot_places, tokens_at
from specstack.training.gates import Gates
from specstack.training.losses import depth_weights, row_losses
from specstack.training.rows import Rows, rows_of
from specstack.training.run_config import Loss, LossKind
from specstack.training.scoring import chunked_sum
from specstack.training.unroll import unroll

LOSE_OWN = 2


@dataclass(frozen=True)
class Seen:
    """What a forward gets of the target."""

    features: TargetFeatures
    final: Float[Tensor, "B L D"]
    """The normed hidden states that its lm_head reads."""


def draft_hidden(
    head: Head, batch: Batch, features: TargetFeatures, depth: int
) -> Float[Tensor, "B A S D"]:
    """Hidden states of every output of a batch."""
    if isinstance(head, BlockHead):
        return block_hidden(head, batch, features)
    return unroll(head, batch, features, depth)


class Objective(nn.Module):
    """A head, and what it is trained for."""

    depth_weights: Tensor

    def __init__(self, head: Head, loss: Loss, depth: int, dtype: torch.dtype) -> None:
        """`dtype` is that of matrix products; weights keep theirs."""
        super().__init__()
        self.head, self.loss, self.depth, self.dtype = head, loss, depth, dtype
        self.gates = Gates(head)
        self.kv_only_weight = 0.0
        """Of the loss on the KV branch alone."""
        weights = torch.tensor([0.0, *depth_weights(depth, loss.gamma)])
        self.register_buffer("depth_weights", weights, persistent=False)
        if dtype != torch.float32:
            head.lm_head.to(dtype)  # once, not in every product

    def rows(self, batch: Batch) -> Rows:
        """What a batch is trained on: drafts whose token is in the draft vocabulary."""
        rows = rows_of(batch, self.head.config)
        if self.head.config.draft_vocab_size is None:
            return rows
        return rows.where(self.head.t2d[rows.labels])

    def weight(self, rows: Rows) -> Tensor:
        """What their losses are divided by."""
        return self.depth_weights[rows.depth].sum()

    def forward(self, batch: Batch, rows: Rows, seen: Seen, total: Tensor) -> dict[str, Tensor]:
        """Return `loss` (divided by `total`) and, without gradient, `depth_loss` [K] (sums)."""
        with torch.autocast(batch.tokens.device.type, self.dtype, self.dtype != torch.float32):
            with self.gates.branches(batch.lost_branch):
                hidden = draft_hidden(self.head, batch, seen.features, self.depth)
            loss, depth_loss = self._scored(hidden, batch, rows, seen)
            means = self.gates.means()
            if self.kv_only_weight:
                with self.gates.branches(torch.full_like(batch.lost_branch, LOSE_OWN)):
                    hidden = draft_hidden(self.head, batch, seen.features, self.depth)
                loss = loss + self.kv_only_weight * self._scored(hidden, batch, rows, seen)[0]
        return {
            "loss": loss / total,
            "depth_loss": depth_loss,
            "gates": torch.tensor(means, device=loss.device),
        }

    def _scored(
        self, hidden: Tensor, batch: Batch, rows: Rows, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        inputs = self.path_inputs(hidden, batch, rows)
        labels = self._draft_ids(rows)
        weights = self.depth_weights[rows.depth]
        depth_loss = torch.zeros_like(self.depth_weights)

        def score(chunk: slice, given: list[Tensor]) -> Tensor:
            target = self._target_logits(rows.place[chunk], seen)
            draft = self.logits(rows.parents[chunk], *given)
            losses = torch.zeros_like(weights[chunk])
            for kind, factor in self._kinds().items():
                losses = losses + factor * self._losses(kind, target, draft, labels[chunk])
            depth_loss.index_add_(0, rows.depth[chunk], losses.detach())
            return (weights[chunk] * losses).sum()

        read_here = self.head.corrector if isinstance(self.head, BlockHead) else self.head.norm
        weights_here = [] if read_here is None else list(read_here.parameters())
        total = chunked_sum(score, inputs, weights_here, self.loss.chunk_rows)
        return total, depth_loss[1:]

    def logits(self, parents: Tensor, hidden: Tensor, states: Tensor | None = None) -> Tensor:
        """Draft logits of rows, [N, W]; correctors read the true parents."""
        if isinstance(self.head, BlockHead):
            return self.head.logits(hidden, parents, states)
        return self.head.logits(hidden)

    def _path_states(self, batch: Batch, rows: Rows) -> Float[Tensor, "N R"] | None:
        if self.head.config.conditioning.kind != "gru":
            return None
        assert isinstance(self.head, BlockHead)
        paths = tokens_at(batch.tokens, slot_places(batch.anchors, self.depth))
        states = self.head.path_states(paths).flatten(0, 2)  # [B*A*K, R]
        return states[rows.block * self.depth + rows.depth - 1]

    def path_inputs(self, hidden: Tensor, batch: Batch, rows: Rows) -> list[Tensor]:
        """What `logits` takes of each row, its parent aside."""
        states = self._path_states(batch, rows)
        flat = hidden.flatten(0, 2)[rows.output]
        return [flat] if states is None else [flat, states]

    def _target_logits(self, places: Tensor, seen: Seen) -> Float[Tensor, "N W"]:
        used, inverse = torch.unique_consecutive(places, return_inverse=True)
        table = self.head.lm_head.weight
        with torch.no_grad():
            return F.linear(seen.final.flatten(0, 1)[used].to(table.dtype), table)[inverse]

    def _losses(self, kind: LossKind, target: Tensor, draft: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss
        return row_losses(kind, target, draft, labels, temperature=loss.temperature, eta=loss.eta)

    def _kinds(self) -> Mapping[LossKind, float]:
        further = self.loss.auxiliary
        factors: dict[LossKind, float] = {
            "forward_kl": further.forward_kl,
            "reverse_kl": further.reverse_kl,
            "ce": further.ce,
            "tv": further.tv,
        }
        factors[self.loss.kind] = factors.get(self.loss.kind, 0.0) + 1.0
        return {kind: factor for kind, factor in factors.items() if factor}

    def _draft_ids(self, rows: Rows) -> Tensor:
        vocabulary = self.head.vocabulary
        return rows.labels if vocabulary is None else vocabulary.to_draft(rows.labels)
