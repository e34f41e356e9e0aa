"""Distances between the target's distribution p and the draft's q, one number per row.

Pure functions of log-probabilities; no gradient flows into p. `lk` is the hybrid of arXiv
2602.23881. Letters: R rows, W draft vocabulary.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.training.run_config import LossKind

Rows = Float[Tensor, "R W"]
PerRow = Float[Tensor, " R"]


def forward_kl(log_p: Rows, log_q: Rows) -> PerRow:
    """KL(p || q)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Rows, log_q: Rows) -> PerRow:
    """KL(q || p)."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def cross_entropy(labels: Int[Tensor, " R"], log_q: Rows) -> PerRow:
    """-log q of the token that follows."""
    return -log_q.gather(-1, labels[:, None])[:, 0]


def total_variation(log_p: Rows, log_q: Rows) -> PerRow:
    """1 - sum min(p, q): the share of drafts that speculative sampling rejects."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def lk(log_p: Rows, log_q: Rows, eta: float) -> PerRow:
    """lambda KL(p || q) + (1 - lambda) TV with lambda = exp(-eta alpha), alpha = sum min(p, q).

    KL leads while little is accepted; what is accepted leads later. No gradient through lambda.
    """
    distance = total_variation(log_p, log_q)
    share = torch.exp(-eta * (1 - distance.detach()))
    return share * forward_kl(log_p, log_q) + (1 - share) * distance


def _log_softmax(logits: Rows, temperature: float) -> Rows:
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def row_losses(
    kind: LossKind,
    target_logits: Rows,
    draft_logits: Rows,
    labels: Int[Tensor, " R"],
    *,
    temperature: float = 1.0,
    eta: float = 3.0,
) -> PerRow:
    """The loss of a kind at a temperature, times its square so that gradients keep their size.

    `ce` knows labels and no temperature.
    """
    if kind == "ce":
        return cross_entropy(labels, draft_logits.float().log_softmax(-1))
    log_p = _log_softmax(target_logits, temperature)
    log_q = _log_softmax(draft_logits, temperature)
    if kind == "lk":
        return temperature**2 * lk(log_p, log_q, eta)
    functions = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "tv": total_variation}
    return temperature**2 * functions[kind](log_p, log_q)


def depth_weights(num_depths: int, gamma: float | None) -> list[float]:
    """Weights of depths 1, 2, ..: exp(-(k - 1) / gamma), or all 1."""
    return [1.0 if gamma is None else math.exp(-k / gamma) for k in range(num_depths)]
