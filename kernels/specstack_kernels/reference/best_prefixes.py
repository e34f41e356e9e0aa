"""The most probable prefixes of a law that factorises over depths: the definition.

DDTree (arXiv 2604.12989, Prop. 1): where the law of a depth does not depend on the path, the tree
of S drafts that maximises the expected number of accepted ones holds the S most probable prefixes.
A heap gives them best first: what is popped is followed by its next sibling and its first child,
neither of which is more probable. The paper leaves ties open; here the lower depth comes first,
then the prefix whose parent came first, then the better rank, which never puts an entry of the heap
before the one that it follows. Sums are float32 from the root down: rounding is monotone, so no
child exceeds its parent. Letters: B requests, K depths, W candidates of a depth, S chosen drafts.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.types import Prefixes


def best_prefixes(
    tokens: Int[Tensor, "B K W"], log_q: Float[Tensor, "B K W"], num_drafts: int
) -> Prefixes:
    """Return the S = min(num_drafts, number of prefixes) best of each request.

    Args:
        log_q: <= 0 and best first in each depth; -inf: no candidate.
    """
    batch, num_depths, width = log_q.shape
    shape = (batch, count_prefixes(num_depths, width, num_drafts))
    prefixes = Prefixes(
        torch.zeros(shape, dtype=torch.int64),
        torch.full(shape, -1, dtype=torch.int64),
        torch.full(shape, -torch.inf),
        torch.full(shape, -torch.inf),
    )
    for b in range(batch):
        depths, ranks, parents, paths = _best_of_request(log_q[b].numpy(), shape[1])
        count = len(paths)
        prefixes.tokens[b, :count] = tokens[b, depths, ranks]
        prefixes.parent_index[b, :count] = torch.tensor(parents)
        prefixes.log_q[b, :count] = log_q[b, depths, ranks]
        prefixes.path_log_q[b, :count] = torch.tensor(paths)
    return prefixes


def _best_of_request(
    log_q: np.ndarray, num_kept: int
) -> tuple[list[int], list[int], list[int], list[np.float32]]:
    """Depths from 0, ranks, parents and log q of the paths of the best, in order."""
    num_depths, width = log_q.shape
    depths: list[int] = []
    ranks: list[int] = []
    parents: list[int] = []
    paths: list[np.float32] = []
    heap: list[tuple[np.float32, int, int, int]] = []  # (-path log q, depth, parent, rank)

    def push(depth: int, parent: int, rank: int) -> None:
        if depth < num_depths and rank < width:
            above = paths[parent] if parent >= 0 else np.float32(0)
            path = above + log_q[depth, rank]
            if path > -np.inf:
                heapq.heappush(heap, (-path, depth, parent, rank))

    push(0, -1, 0)
    while heap and len(paths) < num_kept:
        negated, depth, parent, rank = heapq.heappop(heap)
        depths.append(depth)
        ranks.append(rank)
        parents.append(parent)
        paths.append(-negated)
        push(depth, parent, rank + 1)
        push(depth + 1, len(paths) - 1, 0)
    return depths, ranks, parents, paths


def count_prefixes(num_depths: int, width: int, at_most: int) -> int:
    """Prefixes of up to `num_depths` of `width` candidates each, or `at_most` if that is less."""
    count, of_depth = 0, 1
    for _ in range(num_depths):
        of_depth *= width
        count += of_depth
        if of_depth == 0 or count >= at_most:
            break
    return min(count, at_most)
