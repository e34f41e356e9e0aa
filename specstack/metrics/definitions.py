"""Names, help texts and buckets of the exported metrics: one home for exporter and dashboards.

The four `spec_decode_num_*` counters carry the schema that vLLM, llama.cpp and lmdeploy share
(label `position`, 0-based), so that existing tools read them. Counters where possible: ratios
belong in queries. Every label has a bounded set of values.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

SECONDS_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
DECISION_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.01)

CONTEXT_EDGES = (256, 1024, 4096, 16384, 65536)
"""Upper edges, in tokens, of the buckets of context length."""
CONTEXT_BUCKETS = (*(f"<={edge}" for edge in CONTEXT_EDGES), f">{CONTEXT_EDGES[-1]}")
"""Values of the label `context`."""

GOODPUT_SIDES = ("measured", "predicted", "plain", "shadow")
"""Values of the label `side`: what rounds did; what the cost table and the survivals of drafts
foretold for the budget that was taken, for plain decoding, and for the shadow policy's budget."""


@dataclass(frozen=True)
class Metric:
    """One metric family, without the pipeline's prefix."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS_BUCKETS
    """Of a histogram."""

    @property
    def exported_name(self) -> str:
        """As it stands in `/metrics`, without the prefix: counters end in `_total`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


METRICS: tuple[Metric, ...] = (
    Metric("rounds", "counter", "Rounds of the target over a batch, by the budget and its reason.",
           ("draft_budget", "reason")),
    Metric("emitted_tokens", "counter", "Tokens emitted by rounds: correct drafts and bonus."),
    Metric("opted_out_requests", "counter", "Requests times rounds that asked not to speculate."),
    Metric("gated_requests", "counter", "Requests times rounds that the budget policy let not"
           " draft while others did: their context is too long, or their drafts fail."),
    Metric("spec_decode_num_drafts", "counter", "Request rounds that verified at least a draft."),
    Metric("spec_decode_num_draft_tokens", "counter", "Drafts sent to verification."),
    Metric("spec_decode_num_accepted_tokens", "counter", "Drafts that were correct."),
    Metric("wasted_drafts", "counter", "Drafts sent to verification that were not correct."),
    Metric("spec_decode_num_draft_tokens_per_pos", "counter",
           "Drafts sent to verification at a depth (position 0 is depth 1).", ("position",)),
    Metric("spec_decode_num_accepted_tokens_per_pos", "counter",
           "Correct drafts at a depth (position 0 is depth 1).", ("position",)),
    Metric("spec_decode_num_drafts_per_context", "counter",
           "Request rounds that verified at least a draft, by the request's context length.",
           ("context",)),
    Metric("spec_decode_num_draft_tokens_per_context", "counter",
           "Drafts sent to verification, by the request's context length.", ("context",)),
    Metric("spec_decode_num_accepted_tokens_per_context", "counter",
           "Correct drafts, by the request's context length.", ("context",)),
    Metric("spec_decode_num_draft_tokens_per_drafter", "counter",
           "Drafts sent to verification, by the drafter of a merge that proposed them.",
           ("drafter",)),
    Metric("spec_decode_num_accepted_tokens_per_drafter", "counter",
           "Correct drafts, by the drafter of a merge that proposed them.", ("drafter",)),
    Metric("draft_seconds", "histogram", "Host time of proposing candidates, per round."),
    Metric("build_seconds", "histogram", "Host time of building trees, per round."),
    Metric("verify_seconds", "histogram", "Host time of the target's forward, per round."),
    Metric("accept_seconds", "histogram", "Host time of acceptance and commit, per round."),
    Metric("step_seconds", "histogram", "From the end of a round to the end of the next one, where"
           " nothing came between them."),
    Metric("decision_seconds", "histogram", "Host time of deciding a budget, per round.",
           buckets=DECISION_BUCKETS),
    Metric("draft_budget", "gauge", "Drafts per request allowed in the last round."),
    Metric("num_draft_tokens", "gauge", "Nodes per request verified in the last round."),
    Metric("running_requests", "gauge", "Requests in the last round."),
    Metric("queued_requests", "gauge", "Requests that waited for a place at the last round."),
    Metric("kv_usage", "gauge", "Share of the KV cache in use at the last round."),
    Metric("budget_switches", "counter", "Rounds whose budget differs from that of the round"
           " before."),
    Metric("off_seconds", "counter", "Time in rounds that decoded plainly because the policy"
           " chose to."),
    Metric("fallbacks", "counter", "Times that collapsed acceptance turned drafting off."),
    Metric("fallback_active", "gauge", "1 while drafting is off because acceptance collapsed."),
    Metric("goodput_tokens", "counter", "Tokens of rounds that a prediction was compared for, by"
           " side: measured, predicted, plain (had they decoded plainly), shadow.", ("side",)),
    Metric("goodput_seconds", "counter", "Time of rounds that a prediction was compared for, by"
           " side: measured, predicted, plain (had they decoded plainly), shadow.", ("side",)),
    Metric("shadow_rounds", "counter", "Rounds by what the shadow policy would have chosen.",
           ("draft_budget", "reason")),
    Metric("cost_table_drift", "gauge", "How far measured round times are from the cost table's,"
           " as a share: 0 is none, after what the whole machine's speed explains."),
    Metric("cost_table_info", "gauge", "1, with the cost table in use and where it came from.",
           ("key", "source")),
    Metric("eager_fallbacks", "counter", "Rounds whose verify step ran without a graph although"
           " graphs are on."),
    Metric("prompt_tokens", "counter", "Tokens of prompts, by whether the prefix cache held them.",
           ("source",)),
    Metric("plan_info", "gauge", "1, with the identity of the plan; 0 for one that a change of the"
           " budget replaced.",
           ("plan_hash", "drafter", "tree", "verify", "budget")),
    Metric("head_info", "gauge", "1 per draft head, with the digest of its weights.",
           ("place", "form", "digest")),
)  # fmt: skip


def context_bucket(context_len: int) -> str:
    """The value of the label `context` for a request of so many tokens."""
    return CONTEXT_BUCKETS[bisect_left(CONTEXT_EDGES, context_len)]
