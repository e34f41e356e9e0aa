"""Random candidates and masks for tests and benchmarks of the ops that choose and pack trees.

Letters: B requests, K depths, W candidates of a depth, M candidates, N nodes.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

DEAD_TOKEN = -0x5EADBEEF
"""Stands where no candidate is; no op may return it."""


class RandomMarginals(NamedTuple):
    """One law per depth, best first; some candidates at the end are missing."""

    tokens: Int[Tensor, "B K W"]
    log_q: Float[Tensor, "B K W"]


def random_marginals(
    batch: int, depths: int, width: int, seed: int, *, coarse: bool = False, dead: bool = True
) -> RandomMarginals:
    """Return tokens that are distinct in a depth and falling log q.

    Args:
        coarse: log q are whole numbers, so that most paths tie.
        dead: depths end early, some before the first candidate.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, depths, width)
    log_q = (2 * torch.randn(shape, generator=generator)).log_softmax(dim=-1)
    log_q = log_q.sort(dim=-1, descending=True).values
    tokens = torch.rand(shape, generator=generator).argsort(dim=-1) + 1
    if coarse:
        log_q = log_q.round()
    if dead:
        # Twice the width: half of the depths are full.
        num_live = torch.randint(0, 2 * width + 1, (batch, depths, 1), generator=generator)
        is_dead = torch.arange(width) >= num_live
        log_q = log_q.masked_fill(is_dead, -torch.inf)
        tokens = tokens.masked_fill(is_dead, DEAD_TOKEN)
    return RandomMarginals(tokens, log_q)


class RandomTrie(NamedTuple):
    """Candidates with their parents before them."""

    parent_index: Int[Tensor, "B M"]
    """Any candidate where there is none: nobody may rely on it."""
    log_q: Float[Tensor, "B M"]


def random_trie(
    batch: int, candidates: int, seed: int, *, coarse: bool = False, dead: bool = True
) -> RandomTrie:
    """Return random tries: half of the candidates extend the last one, the rest attach anywhere.

    Args:
        coarse: log q are 0 or -1, so that most paths tie.
        dead: a fifth of the slots holds no candidate.
    """
    rng = random.Random(seed)
    parents: list[int] = []
    log_qs: list[float] = []
    for _ in range(batch * candidates):
        m = len(parents) % candidates
        is_dead = dead and rng.random() < 0.2
        parent = m - 1 if rng.random() < 0.5 else rng.randint(-1, m - 1)
        log_q = float(-rng.randint(0, 1)) if coarse else -rng.random()
        parents.append(candidates - 1 if is_dead else parent)
        log_qs.append(-torch.inf if is_dead else log_q)
    return RandomTrie(
        torch.tensor(parents, dtype=torch.int64).view(batch, candidates),
        torch.tensor(log_qs, dtype=torch.float32).view(batch, candidates),
    )


class RandomMasks(NamedTuple):
    """What `pack_tree_mask` takes."""

    tree_mask: Bool[Tensor, "B N N"]
    seq_lens: Int[Tensor, " B"]
    lens: list[int]
    """`seq_lens` on the host."""


def random_masks(batch: int, nodes: int, longest: int, seed: int) -> RandomMasks:
    """Return random flags, which need not be trees, and lengths from 0 to `longest`."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lens = [rng.choice([0, 1, rng.randint(0, longest), longest]) for _ in range(batch)]
    tree_mask = torch.rand((batch, nodes, nodes), generator=generator) < 0.5
    return RandomMasks(tree_mask, torch.tensor(lens), lens)
