"""The contract of a budget policy: how many drafts a round may verify, and at which price.

A policy decides once a round, on the host, before anything is drafted. It knows what the engine
does now (`Load`), what rounds cost (`CostModel`) and what drafts were worth lately
(`SurvivalWindow`); it never looks at the drafts of the coming round, so that no rule is biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from specstack.budget.costs import CostModel
    from specstack.budget.survival import SurvivalWindow
    from specstack.metrics.record import RoundRecord


@dataclass(frozen=True)
class Load:
    """What the engine is doing when a round starts. Rows are the requests of the batch."""

    num_running: int
    """Requests in the batch."""
    num_queued: int = 0
    """Requests that wait for a place in it."""
    kv_usage: float = 0.0
    """Share of the KV cache's tokens in use, in [0, 1]."""
    context_lens: tuple[int, ...] = ()
    """Committed tokens per request."""
    request_ids: tuple[str, ...] = ()
    """Names of the requests, for what is remembered about each."""
    speculating: tuple[bool, ...] = ()
    """False for requests that opted out; empty: none did."""

    @property
    def num_speculating(self) -> int:
        """Requests that may draft."""
        return sum(self.speculating) if self.speculating else self.num_running

    @property
    def mean_context(self) -> float:
        """Committed tokens per request; 0 where they are not known."""
        return sum(self.context_lens) / len(self.context_lens) if self.context_lens else 0.0


@dataclass(frozen=True)
class Budget:
    """Drafts per request for one round, and why."""

    draft_budget: int
    """Nodes per request, root excluded; 0 = plain decoding: nothing is drafted."""
    reason: str
    """Short, machine-readable, of bounded cardinality."""
    min_survival: float = 0.0
    """Price of a node: drafts whose path is less likely than this to be accepted are not
    verified, however much of the budget is left."""
    request_budgets: tuple[int, ...] | None = None
    """Per request of the load, each at most `draft_budget`; 0: this request does not draft.
    None: `draft_budget` for all."""


@dataclass(frozen=True)
class BudgetRuntime:
    """What the engine lends to a policy."""

    costs: CostModel
    """What rounds cost here; learns from every round."""
    survivals: SurvivalWindow
    """What drafts were worth lately; learns from every round."""
    ragged: bool
    """Nodes that are not verified cost nothing (CPU); False: every request is padded to the
    budget (captured graphs), so only the budget itself decides what a round costs."""


class BudgetPolicy(Protocol):
    """Decides once a round. Deterministic: the same calls in the same order decide the same."""

    def attach(self, runtime: BudgetRuntime) -> None:
        """Take what the engine lends; once, before anything else."""

    def next(self, load: Load) -> Budget:
        """Return the budget of the coming round. Takes less than 50 microseconds."""

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round of the engine, whoever chose its budget; later than its end."""

    @property
    def state(self) -> Mapping[str, Any]:
        """What it knows, for people: small, JSON."""


class LoadPolicy:
    """What a policy leaves out that decides from the load alone."""

    def attach(self, runtime: BudgetRuntime) -> None:
        """Nothing is needed."""

    def observe(self, record: RoundRecord) -> None:
        """Nothing is learned."""

    @property
    def state(self) -> Mapping[str, Any]:
        """Nothing is known."""
        return {}
