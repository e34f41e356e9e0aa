"""Which paths a head expands, depth by depth; the tree builder says which.

Every search keeps fixed shapes that the host knows. Letters: B requests, F frontier nodes of a
depth, k children of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

Path = tuple[int, ...]
"""Ranks among siblings, from the root down."""


@dataclass(frozen=True)
class Kept:
    """The candidates of a depth, and how many of them, from the first on, are expanded."""

    children: Int[Tensor, "B F2"]
    """As places in [F, k], flattened."""
    num_expanded: int


class Search(Protocol):
    """Chooses among the children of a frontier."""

    is_plain: bool
    is_fixed: bool
    """What is expanded depends on no value, drawn or computed."""

    def width(self, draft_budget: int) -> int:
        """Most children of a node that it can use."""

    def depth(self, draft_budget: int) -> int:
        """Deepest candidate that it can use."""

    def keep(self, paths: Float[Tensor, "B F k"], depth: int, draft_budget: int) -> Kept:
        """The children to keep at `depth`, given the log q of their paths. Host sync: none."""


class BestSearch:
    """The best paths of each depth, as many as the budget.

    A path is never less probable than its extensions, so every ancestor of one of the best N nodes
    is one of the best N, too: the candidates hold the best N nodes of the whole trie (DDTree, arXiv
    2604.12989, Prop. 1, for any law that factorises along paths).
    """

    def __init__(
        self,
        width: int | None = None,
        frontier: int | None = None,
        *,
        families: bool = False,
        calibrated: bool = False,
    ) -> None:
        """Keep what best-first, beam or expanding trees can need.

        Args:
            width: most children of a node; None: as many as the budget.
            frontier: most nodes of a depth that are expanded; None: as many as the budget.
            families: keep all children of as many nodes as the budget can expand whole (JetFlow).
            calibrated: the tree ranks the candidates again, and wants more than the best.
        """
        assert not families or width is not None
        self._width, self._frontier, self._families = width, frontier, families
        self.is_plain = frontier is None and not families and not calibrated
        """The best paths of all depths are all that is wanted."""
        self.is_fixed = width == 1

    def width(self, draft_budget: int) -> int:
        """As given; a tree has no more nodes than the budget."""
        return draft_budget if self._width is None else min(self._width, draft_budget)

    def depth(self, draft_budget: int) -> int:
        """No tree is deeper than its nodes."""
        return draft_budget

    def keep(self, paths: Float[Tensor, "B F k"], depth: int, draft_budget: int) -> Kept:
        """The best paths, best first."""
        num_nodes, width = paths.shape[1:]
        num_kept, frontier = draft_budget, self._frontier or draft_budget
        if self._families:
            frontier = -(-draft_budget // width)
            num_kept = num_nodes * width
        num_kept = min(num_kept, num_nodes * width)
        return Kept(paths.flatten(1).topk(num_kept, dim=1).indices, min(frontier, num_kept))


class ShapeSearch:
    """The nodes of a fixed shape."""

    is_plain = False
    is_fixed = True

    def __init__(self, paths: Sequence[Path]) -> None:
        """Take paths of ranks, parents before children."""
        self._paths = [tuple(path) for path in paths]

    def width(self, draft_budget: int) -> int:
        """Of the largest family."""
        return 1 + max(max(path) for path in self._paths[:draft_budget])

    def depth(self, draft_budget: int) -> int:
        """Of the longest path."""
        return max(len(path) for path in self._paths[:draft_budget])

    def keep(self, paths: Float[Tensor, "B F k"], depth: int, draft_budget: int) -> Kept:
        """The shape's nodes of this depth; the frontier is its nodes of the depth before.

        Where a head has fewer children than the shape, so has the tree.
        """
        width = paths.shape[2]
        usable = [path for path in self._paths[:draft_budget] if max(path) < width]
        above = [path for path in usable if len(path) == depth - 1] if depth > 1 else [()]
        place = {path: i for i, path in enumerate(above)}
        rows = [place[path[:-1]] * width + path[-1] for path in usable if len(path) == depth]
        children = torch.tensor(rows, dtype=torch.int64).to(paths.device, non_blocking=True)
        return Kept(children.expand(len(paths), -1), len(rows))


def make_search(
    *,
    width: int | None = None,
    frontier: int | None = None,
    families: bool = False,
    calibrated: bool = False,
    paths: Sequence[Sequence[int]] | None = None,
) -> Search:
    """The search that a tree's options describe."""
    if paths is not None:
        if width is not None or frontier is not None or families or calibrated:
            raise ValueError("a shape has its own width, and nothing of it is left out")
        return ShapeSearch([tuple(path) for path in paths])
    return BestSearch(width, frontier, families=families, calibrated=calibrated)
