"""Random drawn chains for tests of the rules that judge them.

Letters: B requests, N nodes, V vocabulary, T packed rows of logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.testing import RandomSampling, random_sampling


class RandomChain(NamedTuple):
    """Arguments of `accept_block`, in its order, those that belong together in one."""

    draft_tokens: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    law: tuple[Int[Tensor, "B N V"], Float[Tensor, "B N V"]]
    """Tokens and q."""
    logits: tuple[Float[Tensor, "T V"], Int[Tensor, "B N"]]
    """Values and rows."""
    sampling: RandomSampling
    uniforms: Float[Tensor, "B N"]


def random_chain(batch: int, nodes: int, vocab: int, seed: int) -> RandomChain:
    """Drafts from laws near the target's, so that all lengths occur; some candidates impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((batch * nodes, vocab), generator=generator)
    rows = torch.randperm(batch * nodes, generator=generator).view(batch, nodes)
    tokens = torch.rand((batch, nodes, vocab), generator=generator).argsort(dim=-1)
    noise = 0.5 * torch.randn((batch, nodes, vocab), generator=generator)
    probs = torch.softmax(logits[rows] + noise, dim=-1).gather(2, tokens)
    probs *= torch.rand(probs.shape, generator=generator) < 0.9
    probs[..., 0] += 0.01
    draws = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(batch, nodes, 1)
    drafts = tokens.gather(2, draws)[..., 0].roll(1, dims=1)
    is_random = torch.rand((batch, nodes), generator=generator) < 0.1
    drafts = torch.where(is_random, torch.zeros_like(drafts), drafts)
    num_nodes = torch.randint(1, nodes + 1, (batch,), generator=generator)
    num_nodes[0] = nodes
    uniforms = torch.rand((batch, nodes), generator=generator, dtype=torch.float64)
    law, sampling = (tokens, probs * 0.999), random_sampling(batch, vocab, seed)
    return RandomChain(drafts, num_nodes, law, (logits, rows), sampling, uniforms)
