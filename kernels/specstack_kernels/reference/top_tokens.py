"""The k most probable tokens of each row of logits: the definition.

Tokens rank by logit, then by column, the lowest first; log-probabilities rise with logits, but
different logits may round to one log-probability. Letters: R rows, V (draft) vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.types import TopTokens


def top_tokens(
    logits: Float[Tensor, "R V"], k: int, *, token_ids: Int[Tensor, " V"] | None = None
) -> TopTokens:
    """Return the k <= V largest log-softmax values of each row, best first.

    Computed in float64, then rounded to float32.

    Args:
        token_ids: of each column; None: the column itself.
    """
    rows, vocab = logits.shape
    tokens = torch.zeros((rows, k), dtype=torch.int64)
    log_probs = torch.zeros((rows, k))
    for r in range(rows):
        row = logits[r].double()
        ranking = sorted(range(vocab), key=lambda v: (-float(row[v]), v))
        total = row.logsumexp(dim=0)
        for rank, column in enumerate(ranking[:k]):
            tokens[r, rank] = column if token_ids is None else token_ids[column]
            log_probs[r, rank] = row[column] - total
    return TopTokens(tokens, log_probs)
