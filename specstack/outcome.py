"""What a round leaves behind: its tree and decision at once, its counts when they reach the host.

Letters: B requests, N tree nodes, K path width, S drafts offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from specstack.metrics.record import RoundRecord
from specstack.types import AcceptResult, DraftTree

MAX_DRAFTERS = 8
"""Of a merge."""


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._done: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._done = torch.Event(tensor.device)
            self._done.record()

    def numpy(self) -> NDArray[Any]:
        """Host sync: waits for what was queued before the copy, and for nothing after it."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.numpy()

    def tolist(self) -> Any:
        """As `numpy`."""
        return self.numpy().tolist()


@dataclass(frozen=True)
class RoundOutcome:
    """What a round leaves to its caller."""

    tree: DraftTree
    accepted: AcceptResult
    _facts: dict[str, Any]
    _drafts_per_depth: HostCopy
    _num_nodes: HostCopy
    _accept_index: HostCopy
    _offered: HostCopy | None
    _per_drafter: HostCopy | None

    @classmethod
    def of(
        cls, tree: DraftTree, accepted: AcceptResult, facts: dict[str, Any], max_depth: int
    ) -> RoundOutcome:
        """Start the counts' way to the host. Host sync: none."""
        offered = tree.offered_log_q
        return cls(
            tree,
            accepted,
            facts,
            HostCopy(_drafts_per_depth(tree, max_depth)),
            HostCopy(tree.num_nodes),
            HostCopy(accepted.accept_index),
            None if offered is None else HostCopy(offered.exp()),
            _per_drafter(tree, accepted),
        )

    @property
    def record(self) -> RoundRecord:
        """What the round knows of itself. Host sync: waits for the round, if it ran on a device."""
        counts = self._drafts_per_depth.tolist()
        while counts and counts[-1] == 0:
            counts.pop()
        num_drafts = self._num_nodes.numpy() - 1
        drafts, correct = self._per_drafter.tolist() if self._per_drafter else ((), ())
        path = self._accept_index.numpy()
        survivals = None if self._offered is None else self._offered.numpy()
        return RoundRecord(
            num_drafting=int((num_drafts > 0).sum()),
            nodes_per_depth=tuple(counts),
            num_correct=tuple(((path >= 0).sum(axis=1) - 1).tolist()),
            num_drafts=tuple(num_drafts.tolist()),
            survivals=np.zeros((len(path), 0), np.float32) if survivals is None else survivals,
            accept_ranks=np.maximum(path[:, 1:], 0),
            drafts_per_drafter=tuple(drafts),
            correct_per_drafter=tuple(correct),
            **self._facts,
        )


def _drafts_per_depth(tree: DraftTree, max_depth: int) -> Int[Tensor, " K"]:
    """Live drafts at depth 1, 2, .. over all requests. Host sync: none."""
    node = torch.arange(tree.num_draft_tokens, device=tree.tokens.device)
    is_live = node < tree.num_nodes[:, None]
    per_depth = torch.zeros(max_depth + 1, dtype=torch.int64, device=node.device)
    per_depth.scatter_add_(0, tree.depth.reshape(-1), is_live.reshape(-1).long())
    return per_depth[1:]


def drafters_of(
    sources: Int[Tensor, "B N"], accept_index: Int[Tensor, "B K"]
) -> tuple[Int[Tensor, "B N MAX_DRAFTERS"], Int[Tensor, "B K MAX_DRAFTERS"]]:
    """1 where a drafter of a merge proposed a draft of a tree, and of a path. Host sync: none."""
    bits = torch.arange(MAX_DRAFTERS, device=sources.device)
    is_from = (sources[..., None] >> bits) & 1  # 0 at the root
    path = accept_index[..., None]
    on_path = is_from.gather(1, path.clamp(min=0).expand(-1, -1, MAX_DRAFTERS)) * (path >= 0)
    return is_from, on_path


def _per_drafter(tree: DraftTree, accepted: AcceptResult) -> HostCopy | None:
    """Live drafts and correct drafts of each drafter of a merge, [2, MAX_DRAFTERS]."""
    if tree.sources is None:
        return None
    is_from, on_path = drafters_of(tree.sources, accepted.accept_index)
    return HostCopy(torch.stack([is_from.sum((0, 1)), on_path.sum((0, 1))]))
