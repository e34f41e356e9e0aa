"""The record of one speculative round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundRecord:
    """Host-known facts of one round; counts over nodes are kept as tensors by the worker."""

    num_requests: int
    num_opted_out: int
    num_drafting: int
    """Requests whose tree holds at least one draft."""
    draft_budget: int
    """What the policy allowed, per request, root excluded."""
    reason: str
    num_draft_tokens: int
    """Verified nodes per request, root and padding included."""
    nodes_per_depth: tuple[int, ...]
    """Proposed drafts (live nodes) at depth 1, 2, ... over all requests."""
    draft_seconds: float
    build_seconds: float
    verify_seconds: float
    accept_seconds: float
    """Acceptance, KV compaction, publishing."""
    drafts_per_drafter: tuple[int, ...] = ()
    """Proposed drafts by the drafter of a merge that proposed them; by several: counted by each."""
    correct_per_drafter: tuple[int, ...] = ()
    """Those that were correct."""
