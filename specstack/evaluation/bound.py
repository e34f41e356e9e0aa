"""The most that any tree of a budget can be accepted: the tree of the target's own likeliest paths.

Of all trees with B drafts, accepted by sample and walk, the one of the B largest path probabilities
p has the longest accept length: 1 + their sum (DDTree, arXiv 2604.12989, Prop. 1, with p for q).
At temperature 0 one path has all of the probability: 1 + min(B, depth), without a forward.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

NextLaw = Callable[[tuple[int, ...]], Sequence[tuple[int, float]]]
"""From a path to the tokens after it with their probabilities, falling; as many as matter."""


def greedy_bound(draft_budget: int, depth: int) -> float:
    """The bound at temperature 0."""
    return 1.0 + min(draft_budget, depth)


def path_bound(law: NextLaw, budgets: Sequence[int], depth: int) -> list[float]:
    """1 + the sum of the B largest path probabilities, for each B; paths up to `depth`.

    Best first: a path is never likelier than its beginning, so the paths come out in order.
    """
    total, found = 1.0, {0: 1.0}
    heap: list[tuple[float, tuple[int, ...]]] = [(-p, (token,)) for token, p in law(())]
    heapq.heapify(heap)
    for num in range(1, max(budgets) + 1):
        if heap:
            cost, path = heapq.heappop(heap)
            total -= cost
            if len(path) < depth:
                for token, p in law(path):
                    heapq.heappush(heap, (cost * p, (*path, token)))
        found[num] = total
    return [found[budget] for budget in budgets]
