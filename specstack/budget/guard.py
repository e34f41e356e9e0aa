"""Turns drafting off where acceptance collapsed, whatever the policy says, and on again after.

A drafter that suddenly proposes nothing that is accepted (a changed language, a broken
checkpoint) makes every round slower than plain decoding. The guard needs no cost table to see it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specstack.budget.base import Budget, BudgetPolicy, BudgetRuntime, Load
from specstack.budget.gates import Probes
from specstack.metrics.record import RoundRecord

RETURN = 16
"""Request-rounds of probes that must speak for drafting before it comes back."""


class CollapseGuard:
    """A policy around another one."""

    def __init__(
        self, policy: BudgetPolicy, accept_length: float = 1.05, rounds: int = 200
    ) -> None:
        """Take the policy and when to step in.

        Args:
            policy: decides while acceptance is sound.
            accept_length: least mean of tokens that a drafting request emits in a round.
            rounds: the mean is over so many last rounds that drafted; 0 turns the guard off.
        """
        if accept_length < 1:
            raise ValueError(f"accept_length must be at least 1, got {accept_length}")
        if rounds < 0:
            raise ValueError(f"rounds must be at least 0, got {rounds}")
        self.policy = policy
        self.active = False
        self.num_fallbacks = 0
        self._least = accept_length
        self._rounds = rounds
        self._last: deque[tuple[int, int]] = deque()  # correct drafts, drafting requests
        self._correct = self._drafting = 0
        self._probes = Probes()
        self._probed = (0.0, 0.0)
        self._probe = Budget(0, "collapsed")

    def attach(self, runtime: BudgetRuntime) -> None:
        """Hand it on."""
        self.policy.attach(runtime)

    def next(self, load: Load) -> Budget:
        """Return what the policy says; while acceptance is collapsed nothing, or a probe."""
        budget = self.policy.next(load)
        if budget.draft_budget > 0:
            self._probe = replace(budget, reason="probe", request_budgets=None)
        if not self.active:
            return budget
        if load.num_speculating == 0 or self._probe.draft_budget == 0 or not self._probes.due():
            return Budget(0, "collapsed")
        return self._probe

    def observe(self, record: RoundRecord) -> None:
        """Watch the rounds that drafted."""
        self.policy.observe(record)
        if not self._rounds or not record.num_drafting:
            return
        correct, drafting = sum(record.num_correct), record.num_drafting
        if not self.active:
            self._watch(correct, drafting)
        elif record.reason == "probe":
            self._weigh(correct, drafting)

    def _watch(self, correct: int, drafting: int) -> None:
        self._last.append((correct, drafting))
        self._correct += correct
        self._drafting += drafting
        if len(self._last) > self._rounds:
            gone = self._last.popleft()
            self._correct -= gone[0]
            self._drafting -= gone[1]
        if len(self._last) == self._rounds and self._accept_length < self._least:
            self.active = True
            self.num_fallbacks += 1
            self._probes.reset()
            self._probed = (0.0, 0.0)

    def _weigh(self, correct: int, drafting: int) -> None:
        """Add a probe: several in a row, as long as they look good, until they suffice."""
        correct_before, drafting_before = self._probed
        correct_now, drafting_now = correct_before + correct, drafting_before + drafting
        if 1 + correct_now / drafting_now < self._least:
            self._probed = correct_now / 2, drafting_now / 2
            return
        self._probed = correct_now, drafting_now
        self._probes.paid()
        if drafting_now >= RETURN:
            self.active = False
            self._last.clear()
            self._correct = self._drafting = 0

    @property
    def _accept_length(self) -> float:
        return 1 + self._correct / self._drafting if self._drafting else 0.0

    @property
    def state(self) -> Mapping[str, Any]:
        """What the policy knows, and the guard beside it."""
        return {
            **self.policy.state,
            "guard": {
                "active": self.active,
                "fallbacks": self.num_fallbacks,
                "accept_length": round(self._accept_length, 3),
                "probe_wait": self._probes.wait if self.active else None,
            },
        }
