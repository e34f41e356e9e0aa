"""Children of tree nodes under a low-rank corrector: the definition.

A slot's best C tokens have the logits `base`; the tokens outside weigh exp(rest) together and are
proposed by nobody. The state of a node's path adds `rows @ state` to the C logits (DSpark, arXiv
2607.05147; Domino, 2605.29707), so that

    corrected = base + rows @ state
    log_q = corrected - log(sum_c exp(corrected_c) + exp(rest))

Deviation: the papers correct every token, which costs one lm_head per node; here the tokens
outside keep their weight. Letters: B requests, F nodes of one depth, C candidates, R rank.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from specstack_kernels.types import ScoredFrontier


def score_frontier(
    state: Float[Tensor, "B F R"],
    rows: Float[Tensor, "B C R"],
    base: Float[Tensor, "B C"],
    rest: Float[Tensor, " B"],
    *,
    width: int,
) -> ScoredFrontier:
    """Return log q of all candidates and each node's best `width`, at most C, best first.

    Computed exactly, then rounded to float32 (float64 if the state is). Of equal candidates the
    lower index comes first; those of no probability come last in any order.
    """
    batch, nodes, _ = state.shape
    candidates = rows.shape[1]
    dtype = torch.promote_types(state.dtype, torch.float32)
    log_q = torch.zeros(batch, nodes, candidates, dtype=torch.float64)
    best_index = torch.zeros(batch, nodes, min(width, candidates), dtype=torch.int64)
    for b in range(batch):
        for f in range(nodes):
            corrected = base[b].double() + rows[b].double() @ state[b, f].double()  # [C]
            total = torch.cat([corrected, rest[b, None].double()]).logsumexp(dim=0)
            log_q[b, f] = corrected - total
            ranking = sorted(range(candidates), key=lambda c: (-float(log_q[b, f, c]), c))
            best_index[b, f] = torch.tensor(ranking[:width])
    best_log_q = log_q.gather(2, best_index)
    return ScoredFrontier(log_q.to(dtype), best_index, best_log_q.to(dtype))
