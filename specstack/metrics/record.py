"""The record of one speculative round: what metrics, policies, traces and replays read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def _nothing() -> NDArray[np.float32]:
    return np.zeros((0, 0), dtype=np.float32)


def _no_ranks() -> NDArray[np.int64]:
    return np.zeros((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class RoundRecord:
    """One round, complete: made when its accept counts are on the host.

    Letters: B requests, S drafts offered per request, K accepted path without the root. Rows of
    all per-request fields are the requests of the batch, those that did not draft included.
    """

    num_requests: int
    num_opted_out: int
    """Requests that asked not to speculate."""
    num_drafting: int
    """Requests whose tree holds at least one draft."""
    draft_budget: int
    """What the policy allowed, per request, root excluded."""
    reason: str
    num_draft_tokens: int
    """Nodes per request of the verify step, root and padding included."""
    nodes_per_depth: tuple[int, ...]
    """Proposed drafts (live nodes) at depth 1, 2, ... over all requests."""
    draft_seconds: float
    build_seconds: float
    verify_seconds: float
    accept_seconds: float
    """Acceptance, KV compaction, publishing."""
    num_correct: tuple[int, ...] = ()
    """Correct drafts per request [B]; each request emitted one token more."""
    drafts_per_drafter: tuple[int, ...] = ()
    """Proposed drafts by the drafter of a merge that proposed them; by several: counted by each."""
    correct_per_drafter: tuple[int, ...] = ()
    """Those that were correct."""
    num_gated: int = 0
    """Requests that wanted to speculate and were given a budget of 0 while others were not."""
    min_survival: float = 0.0
    """The price that drafts had to be worth."""
    num_drafts: tuple[int, ...] = ()
    """Verified drafts (live nodes without the root) per request [B]."""
    ended: tuple[int, ...] = ()
    """1 for requests that had ended when the round ran, which an engine that overlaps rounds learns
    too late [B]; empty: none had. They cost time, but nothing else here counts them."""
    survivals: NDArray[np.float32] = field(default_factory=_nothing)
    """[B, S]: probability that the target accepts the path to each draft that was offered, in the
    order in which budgets take them (calibrated, where the tree is), before the price left any out:
    the best first, so that rows fall, but drawn drafts in the order of the draws. 0 where there was
    none. S = 0 when nothing was drafted."""
    accept_ranks: NDArray[np.int64] = field(default_factory=_no_ranks)
    """[B, K]: places (1 = best, the columns of `survivals` counted from 1) of the correct drafts
    of each request, rising; 0 pads. A smaller budget b would have accepted those up to b."""
    request_ids: tuple[str, ...] = ()
    context_lens: tuple[int, ...] = ()
    """Committed tokens per request before the round [B]."""
    num_queued: int = 0
    kv_usage: float = 0.0
    started_at: float = 0.0
    """Seconds since the epoch."""
    step_seconds: float | None = None
    """From the end of the round before to the end of this one; None when something else (a prompt,
    a pause) came between them."""

    @property
    def num_emitted(self) -> int:
        """Tokens that the round emitted."""
        return sum(self.num_correct) + len(self.num_correct) - sum(self.ended)

    @property
    def num_asked(self) -> int:
        """Requests that were to draft, if they had something to propose."""
        return self.num_requests - self.num_opted_out - self.num_gated - sum(self.ended)

    @property
    def counted_drafts(self) -> tuple[int, ...]:
        """`num_drafts` without those of requests that had ended."""
        if not any(self.ended):
            return self.num_drafts
        pairs = zip(self.num_drafts, self.ended, strict=True)
        return tuple(0 if ended else drafts for drafts, ended in pairs)

    @property
    def round_seconds(self) -> float:
        """Host time of the round's phases."""
        return self.draft_seconds + self.build_seconds + self.verify_seconds + self.accept_seconds
