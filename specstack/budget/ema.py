"""The ema policy: a budget that follows a moving average of correct drafts; no cost table.

After SGLang's adaptive mode (speculative/adaptive_spec_params.py of 0.5.23): an average with
alpha 0.2 of the mean of correct drafts per request, looked at every 5 rounds after 10 rounds of
warm-up, apart for every size class of batches, moved by hysteresis. There it is the number of
draft steps of a chain that moves; here the number of drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specstack.budget.base import Budget, BudgetRuntime, Load
from specstack.metrics.record import RoundRecord

ALPHA = 0.2
UPDATE_EVERY = 5
WARM_UP = 10


@dataclass
class _Slot:
    """What is known about one size class of batches."""

    choice: int
    """Index."""
    average: float | None = None
    rounds: int = 0
    """Observed since the choice was made."""


class EmaPolicy:
    """Goes a choice up when correct drafts come near what it can give, down when far below.

    From W drafts up: average > room x W + hysteresis. Down to W drafts: average < room x W -
    hysteresis. It knows no costs, so it never turns drafting off but beyond the last size class.
    """

    def __init__(
        self,
        choices: Sequence[int],
        max_batches: Sequence[int] = (1, 8, 32),
        room: float = 0.5,
        hysteresis: float = 0.1,
    ) -> None:
        """Take choices and classes.

        Args:
            choices: draft budgets, rising from at least 1.
            max_batches: largest batch of each size class, rising; beyond the last: plain decoding.
            room: correct drafts per draft at which a budget counts as used up, in (0, 1].
            hysteresis: correct drafts that the average must be beyond that.
        """
        for name, values in (("choices", choices), ("max_batches", max_batches)):
            if not values or values[0] < 1 or any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"{name} must rise from at least 1, got {list(values)}")
        if not 0 < room <= 1:
            raise ValueError(f"room must be in (0, 1], got {room}")
        if hysteresis < 0:
            raise ValueError(f"hysteresis must be at least 0, got {hysteresis}")
        self._choices = list(choices)
        self._max_batches = list(max_batches)
        self._room, self._hysteresis = room, hysteresis
        self._slots = [_Slot((len(self._choices) - 1) // 2) for _ in self._max_batches]
        self._beyond = Budget(0, f"batch>{self._max_batches[-1]}")

    def attach(self, runtime: BudgetRuntime) -> None:
        """Nothing is needed."""

    def _slot(self, num_requests: int) -> _Slot | None:
        index = bisect_left(self._max_batches, num_requests)
        return self._slots[index] if index < len(self._slots) else None

    def next(self, load: Load) -> Budget:
        """Return the choice of the size class of the batch."""
        if load.num_speculating == 0:
            return Budget(0, "idle")
        slot = self._slot(load.num_running)
        return self._beyond if slot is None else Budget(self._choices[slot.choice], "ema")

    def observe(self, record: RoundRecord) -> None:
        """Move the average of the batch's size class by a round that drafted."""
        slot = self._slot(record.num_requests)
        if slot is None or not record.num_drafting:
            return
        correct = sum(record.num_correct) / record.num_drafting
        before = correct if slot.average is None else slot.average
        slot.average = before + ALPHA * (correct - before)
        slot.rounds += 1
        if slot.rounds >= WARM_UP and slot.rounds % UPDATE_EVERY == 0:
            self._move(slot, slot.average)

    def _move(self, slot: _Slot, average: float) -> None:
        used_up = [self._room * choice for choice in self._choices]
        at = slot.choice
        if at + 1 < len(used_up) and average > used_up[at] + self._hysteresis:
            slot.choice, slot.rounds = at + 1, 0
        elif at > 0 and average < used_up[at - 1] - self._hysteresis:
            slot.choice, slot.rounds = at - 1, 0

    @property
    def state(self) -> Mapping[str, Any]:
        """Average and choice of every size class."""
        return {
            f"batch<={most}": {
                "choice": self._choices[slot.choice],
                "correct": None if slot.average is None else round(slot.average, 3),
            }
            for most, slot in zip(self._max_batches, self._slots, strict=True)
        }
