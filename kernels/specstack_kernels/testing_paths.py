"""Random accepted paths for tests and benchmarks. Letters: B requests, N nodes, K path width."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor


class RandomPaths(NamedTuple):
    """Paths of rising node ids, and windows of slots scattered over a pool."""

    window: Int[Tensor, "B N"]
    accept_index: Int[Tensor, "B K"]
    num_slots: int
    """Of the pool: some belong to no window."""


def random_paths(batch: int, nodes: int, width: int, seed: int) -> RandomPaths:
    """Return paths of 1 to K nodes; that of request 0 is as long as can be."""
    rng = random.Random(seed)
    num_slots = batch * nodes + 5
    window = torch.tensor(rng.sample(range(num_slots), batch * nodes)).view(batch, nodes)
    accept_index = torch.full((batch, width), -1)
    for b in range(batch):
        longest = min(width, nodes)
        length = longest if b == 0 else rng.randint(1, longest)
        path = [0, *sorted(rng.sample(range(1, nodes), length - 1))]
        accept_index[b, :length] = torch.tensor(path)
    return RandomPaths(window, accept_index, num_slots)
