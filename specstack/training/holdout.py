"""How well a head drafts on texts that it was not trained on.

A draft is right where its best token is the target's best over the whole vocabulary. Paths are the
text's own, which is what a right draft leaves; so alpha_k, the share of right drafts of depth k
among those whose path is right, is what greedy verification of one chain meets. Letters:
B sequences, A anchors, K depth, N rows, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from specstack.training.batches import Batch
from specstack.training.objective import Objective, Seen, draft_hidden
from specstack.training.rows import Rows, rows_of


@dataclass(frozen=True)
class Holdout:
    """What was counted; add them up to join batches or processes."""

    reached: Tensor
    """[K], drafts whose path is right."""
    right: Tensor
    """[K], those of them that are right themselves."""

    @property
    def alphas(self) -> list[float]:
        """alpha_k, 0 where nothing was reached."""
        return (self.right / self.reached.clamp(min=1)).tolist()

    @property
    def accept_length(self) -> float:
        """1 + sum over k of alpha_1 .. alpha_k: tokens per round of a chain, the bonus included."""
        alphas = self.alphas
        return 1 + sum(prod(alphas[:k]) for k in range(1, len(alphas) + 1))


@torch.no_grad()
def evaluate(
    objective: Objective, batches: Iterable[tuple[Batch, Seen]], lm_head: Tensor
) -> Holdout:
    """Count over batches; heads trained to refresh are looked at with real paths."""
    counts = torch.zeros(2, objective.depth)
    for batch, seen in batches:
        if objective.head.config.conditioning.kind == "refresh":
            size = objective.head.config.block_size
            batch = replace(batch, num_real=torch.full_like(batch.num_real, size))
        counts += _counted(objective, batch, seen, lm_head).cpu()
    return Holdout(counts[0], counts[1])


def _counted(objective: Objective, batch: Batch, seen: Seen, lm_head: Tensor) -> Tensor:
    """[2, K]: reached, right."""
    rows = rows_of(batch, objective.head.config)
    dtype = objective.dtype
    with torch.autocast(batch.tokens.device.type, dtype, dtype != torch.float32):
        hidden = draft_hidden(objective.head, batch, seen.features, objective.depth)
        is_right = _right(
            objective, objective.path_inputs(hidden, batch, rows), rows, seen, lm_head
        )
    shape = (batch.anchors.numel(), objective.depth)
    right = torch.zeros(shape, dtype=torch.bool, device=is_right.device)
    exists = right.clone()
    at = (rows.block, rows.depth - 1)
    right[at], exists[at] = is_right, True
    alive = F.pad(right.cumprod(dim=1)[:, :-1], (1, 0), value=1).bool()
    reached = exists & alive
    return torch.stack([reached.sum(0), (reached & right).sum(0)]).float()


def _right(
    objective: Objective, inputs: list[Tensor], rows: Rows, seen: Seen, lm_head: Tensor
) -> Tensor:
    """[N]: the draft's best token is the target's."""
    final, vocabulary = seen.final.flatten(0, 1), objective.head.vocabulary
    found = []
    for start in range(0, len(rows), objective.loss.chunk_rows):
        chunk = slice(start, start + objective.loss.chunk_rows)
        used, inverse = torch.unique_consecutive(rows.place[chunk], return_inverse=True)
        best = F.linear(final[used].to(lm_head.dtype), lm_head).argmax(-1)[inverse]
        draft = objective.logits(rows.parents[chunk], *(x[chunk] for x in inputs)).argmax(-1)
        found.append((draft if vocabulary is None else vocabulary.to_target(draft)) == best)
    return torch.cat(found) if found else rows.place.new_zeros(0, dtype=torch.bool)
