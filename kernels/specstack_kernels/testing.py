"""Random inputs for tests and benchmarks of the ops. Letters: B requests, N nodes, V vocabulary."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

TREE_SHAPES = [(1, 1, 2), (3, 7, 2), (4, 33, 3), (2, 64, 5)]
"""(B, N, V): a lone root, odd, one past a block, a full block."""


class RandomTree(NamedTuple):
    """Trees with distinct tokens among siblings; row 0 has no dead node."""

    draft_tokens: Int[Tensor, "B N"]
    parent_index: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    max_depth: int
    """Depth of the deepest node of the batch."""


def random_tree(batch: int, nodes: int, vocab: int, seed: int) -> RandomTree:
    """Return random trees: half of the nodes extend the last one, the rest attach anywhere."""
    rng = random.Random(seed)
    draft_tokens = torch.zeros((batch, nodes), dtype=torch.int64)
    parent_index = torch.zeros((batch, nodes), dtype=torch.int64)
    parent_index[:, 0] = -1
    num_nodes = torch.tensor([nodes] + [rng.randint(1, nodes) for _ in range(batch - 1)])
    max_depth = 0
    for b in range(batch):
        draft_tokens[b, 0] = rng.randrange(vocab)
        unused = {0: list(range(vocab))}
        depth = {0: 0}
        for node in range(1, int(num_nodes[b])):
            open_parents = [parent for parent, tokens in unused.items() if tokens]
            parent = node - 1 if rng.random() < 0.5 else rng.choice(open_parents)
            token = unused[parent].pop(rng.randrange(len(unused[parent])))
            draft_tokens[b, node] = token
            parent_index[b, node] = parent
            unused[node] = list(range(vocab))
            depth[node] = depth[parent] + 1
        max_depth = max(max_depth, *depth.values())
    return RandomTree(draft_tokens, parent_index, num_nodes, max_depth)


class RandomSampling(NamedTuple):
    """Sampling settings of a batch, in the order in which the ops take them."""

    temperature: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    min_p: Float[Tensor, " B"]


def random_sampling(batch: int, vocab: int, seed: int) -> RandomSampling:
    """Return settings that mix greedy, unfiltered and filtered requests."""
    rng = random.Random(seed)
    top_k = [rng.choice([1, 2, max(1, vocab // 2), 1 << 30]) for _ in range(batch)]
    return RandomSampling(
        torch.tensor([rng.choice([0.5, 1.0, 1.7]) for _ in range(batch)]),
        torch.tensor(top_k),
        torch.tensor([rng.choice([0.3, 0.8, 1.0]) for _ in range(batch)]),
        torch.tensor([rng.choice([0.0, 0.05, 0.4]) for _ in range(batch)]),
    )
