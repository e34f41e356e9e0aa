"""Runs the budget policies of one engine: who acts, who only watches, and what both learn.

The engine asks `next` before a round and reports every round to `observe`, in the same order, one
or two rounds later. Policies may be replaced while it runs; what was learned about costs stays,
and what drafts were worth is told again from the last rounds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specstack.budget.base import Budget, BudgetPolicy, BudgetRuntime, Load
from specstack.budget.costs import CostModel
from specstack.budget.guard import CollapseGuard
from specstack.budget.survival import PRICES, SurvivalWindow
from specstack.metrics.acceptance import RecentAcceptance
from specstack.metrics.record import RoundRecord

REMEMBERED_ROUNDS = 64
"""Told to a survival window that is made for other budgets."""


@dataclass(frozen=True)
class Policies:
    """Who decides."""

    acting: BudgetPolicy
    budgets: tuple[int, ...]
    """All that any of them may choose, 0 included, rising."""
    shadow: BudgetPolicy | None = None
    guard: Callable[[BudgetPolicy], CollapseGuard] = CollapseGuard
    """Wraps the acting policy."""
    name: str = ""
    shadow_name: str = ""


@dataclass(frozen=True)
class Decision:
    """What was decided for one round."""

    load: Load
    budget: Budget
    shadow: Budget | None


Side = tuple[float, float]
"""Tokens and seconds of a round."""


@dataclass(frozen=True)
class Report:
    """A round and what was foretold for it."""

    record: RoundRecord
    decision: Decision
    is_switch: bool
    """Another budget than in the round before."""
    num_fallbacks: int
    """Times that acceptance collapsed since the round before: 0 or 1."""
    sides: dict[str, Side]
    """By `GOODPUT_SIDES`; empty where nothing can be foretold, or the step was not timed."""


class BudgetController:
    """Owns the policies, the cost model and the survival window."""

    def __init__(self, policies: Policies, costs: CostModel, *, ragged: bool) -> None:
        self.costs = costs
        self.acceptance = RecentAcceptance()
        self.num_rounds = 0
        self.ragged = ragged
        self._recent: deque[RoundRecord] = deque(maxlen=REMEMBERED_ROUNDS)
        self._decisions: deque[Decision] = deque()
        self._last: Decision | None = None
        self._last_reported = 0
        self._forced: int | None = None
        self._forced_until = math.inf
        self.use(policies)

    def use(self, policies: Policies) -> None:
        """Let these policies decide from the next round on."""
        self.policies = policies
        self._window = SurvivalWindow(sorted({0, *policies.budgets}), PRICES)
        for record in self._recent:
            self._window.observe(record)
        runtime = BudgetRuntime(self.costs, self._window, self.ragged)
        self.guard = policies.guard(policies.acting)
        self.guard.attach(runtime)
        if policies.shadow is not None:
            policies.shadow.attach(runtime)

    def force(self, draft_budget: int | None, seconds: float | None = None) -> None:
        """Use this budget, without a price, whatever the policies say; None: as they say.

        Args:
            seconds: after which it is lifted by itself; None: never.
        """
        self._forced = draft_budget
        self._forced_until = math.inf if seconds is None else time.monotonic() + seconds

    def forget(self) -> None:
        """Drop what was learned about drafts (not about costs): what was drafted was no traffic."""
        self._recent.clear()
        self.acceptance = RecentAcceptance()
        self.use(self.policies)

    def next(self, load: Load) -> Budget:
        """Decide the coming round."""
        shadow = self.policies.shadow
        watched = None if shadow is None else shadow.next(load)
        if self._forced is not None and time.monotonic() > self._forced_until:
            self._forced = None
        forced = self._forced
        budget = self.guard.next(load) if forced is None else Budget(forced, "forced")
        if load.speculating and budget.draft_budget > 0 and not any(load.speculating):
            budget = Budget(0, "idle")
        self._last = Decision(load, budget, watched)
        self._decisions.append(self._last)
        return budget

    def impose(self, budget: Budget) -> None:
        """Take another rank's decision for the round that was just decided."""
        assert self._last is not None
        self._last = replace(self._last, budget=budget)
        self._decisions[-1] = self._last

    def observe(self, record: RoundRecord) -> Report:
        """Learn from the oldest round that was decided and not yet reported."""
        decision = self._decisions.popleft()
        self.num_rounds += 1
        # Before anybody learns from it: a forecast, not a fit.
        sides = self._sides(record, decision)
        is_switch = self.num_rounds > 1 and record.draft_budget != self._last_reported
        self._last_reported = record.draft_budget
        fallbacks = self.guard.num_fallbacks
        self.costs.observe(record)
        self._window.observe(record)
        self._recent.append(record)
        self.guard.observe(record)
        if self.policies.shadow is not None:
            self.policies.shadow.observe(record)
        self.acceptance.observe(record)
        return Report(record, decision, is_switch, self.guard.num_fallbacks - fallbacks, sides)

    def _sides(self, record: RoundRecord, decision: Decision) -> dict[str, Side]:
        if record.step_seconds is None or not self.costs.ready:
            return {}
        plain = self._forecast(decision.load, Budget(0, ""))

        def foretold(budget: Budget) -> Side:
            return self._forecast(decision.load, budget) if budget.draft_budget else plain

        sides = {
            "measured": (float(record.num_emitted), record.step_seconds),
            "predicted": foretold(decision.budget),
            "plain": plain,
        }
        if decision.shadow is not None:
            sides["shadow"] = foretold(decision.shadow)
        return sides

    def _forecast(self, load: Load, budget: Budget) -> Side:
        """Tokens and seconds that a budget gives at this load, by what is known now."""
        emitted, drafts = self._worth(budget)
        wants = load.speculating or (True,) * load.num_running
        limits = budget.request_budgets or (budget.draft_budget,) * load.num_running
        drafting = sum(1 for want, limit in zip(wants, limits, strict=True) if want and limit)
        if budget.draft_budget == 0:
            drafting = 0
        tokens = load.num_running + drafting * (emitted - 1)
        width = 1 + (drafts * drafting / load.num_running if self.ragged else budget.draft_budget)
        milliseconds = self.costs.step_ms(
            load.num_running,
            load.mean_context,
            np.array([budget.draft_budget if drafting else 0]),
            np.array([[width if drafting else 1.0]]),
        )
        return tokens, float(milliseconds[0, 0]) / 1000

    def _worth(self, budget: Budget) -> Side:
        """Emitted tokens and verified drafts of a drafting request."""
        if budget.draft_budget == 0:
            return 1.0, 0.0
        emitted, drafts = self._window.expected()
        row = int(np.searchsorted(self._window.budgets, budget.draft_budget))
        row = min(row, len(self._window.budgets) - 1)
        at = [np.interp(budget.min_survival, PRICES, values[row]) for values in (emitted, drafts)]
        return float(at[0]), float(at[1])

    @property
    def status(self) -> dict[str, Any]:
        """JSON, for people and tools."""
        policies, last = self.policies, self._last
        return {
            "policy": {"kind": policies.name, **self.guard.state},
            "shadow": None if policies.shadow is None else {
                "kind": policies.shadow_name,
                **policies.shadow.state,
                "next": None if last is None else _brief(last.shadow),
            },
            "budget": None if last is None else _brief(last.budget),
            "load": None if last is None else {
                "num_running": last.load.num_running,
                "num_queued": last.load.num_queued,
                "kv_usage": round(last.load.kv_usage, 4),
                "mean_context": round(last.load.mean_context, 1),
            },
            "forced": self._forced,
            "choices": list(policies.budgets),
            "rounds": self.num_rounds,
            "fallback": {"active": self.guard.active, "count": self.guard.num_fallbacks},
            "costs": dict(self.costs.state),
            "survivals": dict(self._window.state),
            "acceptance": self.acceptance.state,
        }  # fmt: skip


def _brief(budget: Budget | None) -> dict[str, Any] | None:
    if budget is None:
        return None
    return {
        "draft_budget": budget.draft_budget,
        "reason": budget.reason,
        "min_survival": round(budget.min_survival, 4),
    }
