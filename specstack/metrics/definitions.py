"""Names, help texts and buckets of the exported metrics: one home for exporter and dashboards.

The four `spec_decode_num_*` counters carry the schema that vLLM, llama.cpp and lmdeploy share
(label `position`, 0-based), so that existing tools read them. Counters only: ratios belong in
queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SECONDS_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """One metric family, without the pipeline's prefix."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("rounds", "counter", "Rounds of the target over a batch, by why the budget was chosen.",
           ("reason",)),
    Metric("emitted_tokens", "counter", "Tokens emitted by rounds: correct drafts and bonus."),
    Metric("opted_out_requests", "counter", "Requests times rounds that asked not to speculate."),
    Metric("spec_decode_num_drafts", "counter", "Request rounds that verified at least a draft."),
    Metric("spec_decode_num_draft_tokens", "counter", "Drafts sent to verification."),
    Metric("spec_decode_num_accepted_tokens", "counter", "Drafts that were correct."),
    Metric("spec_decode_num_draft_tokens_per_pos", "counter",
           "Drafts sent to verification at a depth (position 0 is depth 1).", ("position",)),
    Metric("spec_decode_num_accepted_tokens_per_pos", "counter",
           "Correct drafts at a depth (position 0 is depth 1).", ("position",)),
    Metric("spec_decode_num_draft_tokens_per_drafter", "counter",
           "Drafts sent to verification, by the drafter of a merge that proposed them.",
           ("drafter",)),
    Metric("spec_decode_num_accepted_tokens_per_drafter", "counter",
           "Correct drafts, by the drafter of a merge that proposed them.", ("drafter",)),
    Metric("draft_seconds", "histogram", "Host time of proposing candidates, per round."),
    Metric("build_seconds", "histogram", "Host time of building trees, per round."),
    Metric("verify_seconds", "histogram", "Host time of the target's forward, per round."),
    Metric("accept_seconds", "histogram", "Host time of acceptance and commit, per round."),
    Metric("draft_budget", "gauge", "Drafts per request allowed in the last round."),
    Metric("num_draft_tokens", "gauge", "Nodes per request verified in the last round."),
)  # fmt: skip
