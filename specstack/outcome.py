"""What a round leaves behind: its tree and decision at once, its counts when they reach the host.

Letters: B requests, N tree nodes, K path width, S drafts offered.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._copy = tensor
        self._done: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._copy = tensor.to("cpu", non_blocking=True)
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
    _wanted: NDArray[np.bool_]
    _asked: NDArray[np.bool_]
    _depth: HostCopy
    _num_nodes: HostCopy
    _accept_index: HostCopy
    _offered: HostCopy | None
    _per_drafter: HostCopy | None

    @classmethod
    def of(
        cls,
        tree: DraftTree,
        accepted: AcceptResult,
        facts: dict[str, Any],
        wanted: Sequence[bool],
        asked: Sequence[bool],
    ) -> RoundOutcome:
        """Start the counts' way to the host. Host sync: none.

        Args:
            wanted: requests that did not opt out.
            asked: those of them that were to draft.
        """
        offered = tree.offered_log_q
        return cls(
            tree,
            accepted,
            facts,
            np.asarray(wanted, bool),
            np.asarray(asked, bool),
            HostCopy(tree.depth),
            HostCopy(tree.num_nodes),
            HostCopy(accepted.accept_index),
            None if offered is None else HostCopy(offered.exp()),
            _per_drafter(tree, accepted),
        )

    @property
    def seconds(self) -> float:
        """Host time of the round's phases."""
        phases = [value for name, value in self._facts.items() if name.endswith("_seconds")]
        return float(sum(phases))

    def record(self, ended: Sequence[bool] = (), **known: Any) -> RoundRecord:
        """What the round knows of itself. Host sync: waits for the round, if it ran on a device.

        Args:
            ended: per request, whether it had ended when the round ran; empty: none had.
            known: fields of the record that its caller knows.
        """
        num_nodes, path = self._num_nodes.numpy(), self._accept_index.numpy()
        counts = np.ones(len(path), bool) if not any(ended) else ~np.asarray(ended)
        correct = np.where(counts, (path >= 0).sum(axis=1) - 1, 0)
        offered = np.zeros((len(path), 0), np.float32)
        if self._offered is not None:
            offered = np.where(counts[:, None], self._offered.numpy(), 0)
        drafts_of, correct_of = (), ()
        if self._per_drafter is not None:
            drafts_of, correct_of = self._per_drafter.numpy()[:, counts].sum(axis=1).tolist()
        return RoundRecord(
            num_opted_out=int((~self._wanted & counts).sum()),
            num_gated=int((self._wanted & ~self._asked & counts).sum()),
            num_drafting=int((num_nodes[counts] > 1).sum()),
            nodes_per_depth=_drafts_per_depth(self._depth.numpy()[counts], num_nodes[counts]),
            num_correct=tuple(correct.tolist()),
            num_drafts=tuple((num_nodes - 1).tolist()),
            ended=() if counts.all() else tuple((~counts).astype(int).tolist()),
            survivals=offered,
            accept_ranks=np.where(counts[:, None], np.maximum(path[:, 1:], 0), 0),
            drafts_per_drafter=tuple(drafts_of),
            correct_per_drafter=tuple(correct_of),
            **self._facts,
            **known,
        )


def _drafts_per_depth(depth: NDArray[Any], num_nodes: NDArray[Any]) -> tuple[int, ...]:
    """Live drafts at depth 1, 2, .. of all rows [B, N], [B]."""
    is_live = np.arange(depth.shape[1]) < num_nodes[:, None]
    return tuple(np.bincount(depth[is_live])[1:].tolist())


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
    """Live drafts and correct drafts of each drafter of a merge, [2, B, MAX_DRAFTERS]."""
    if tree.sources is None:
        return None
    is_from, on_path = drafters_of(tree.sources, accepted.accept_index)
    return HostCopy(torch.stack([is_from.sum(1), on_path.sum(1)]))
