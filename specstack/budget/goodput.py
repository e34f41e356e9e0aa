"""The goodput policy: the budget and price with the most tokens per second at the present load.

G(W, l) = (requests + drafting requests x (E[tokens | W, l] - 1)) / step_ms(requests, context, W,
tokens verified). Acceptance alone does not say whether drafts pay: G of plain decoding is the bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specstack.budget.base import Budget, BudgetRuntime, Load
from specstack.budget.gates import Probes, RequestGates
from specstack.metrics.record import RoundRecord

Floats = NDArray[np.float64]

LOOK_EVERY = 8
"""Rounds between two comparisons at an unchanged load."""
ENOUGH = 8.0
"""Request-rounds that the survivals must rest on; before, a middle budget is tried."""
PLAIN_EVERY, PLAIN_ROUNDS = 256, 2
"""While drafting, so many rounds of so many decode plainly: what is never run is known by the cost
table alone, and a table that is wrong about it would never be found out."""
LARGE_GAIN = 0.1
"""A predicted gain from which nothing is waited for."""
BURST = 1.5
"""Factor of requests from which the load is another one."""


class GoodputPolicy:
    """Compares all its choices; keeps the last one unless another is clearly better.

    Without a cost table nothing says that drafts pay: it decodes plainly but for probes. While
    plain decoding is best, probes find out when that changes.
    """

    def __init__(
        self,
        choices: Sequence[int],
        prices: bool = True,
        dwell_rounds: int = 8,
        hysteresis: float = 0.03,
        max_context: int | None = None,
        costs: str = "auto",
    ) -> None:
        """Take the choices and what holds it back.

        Args:
            choices: draft budgets, rising from 0, which is plain decoding.
            prices: whether it may set a price; False where drafts are drawn. On an engine that
                pads it never does, as nothing is saved there.
            dwell_rounds: rounds that a choice is kept, unless the load changes or much is gained.
            hysteresis: share that another choice must be better by.
            max_context: requests beyond so many tokens do not draft; None: no limit.
            costs: where the engine finds the cost table; the policy gets it by `attach`.
        """
        if len(choices) < 2 or choices[0] != 0 or any(a >= b for a, b in pairwise(choices)):
            raise ValueError(f"choices must rise from 0 to a draft at least, got {list(choices)}")
        if dwell_rounds < 0:
            raise ValueError(f"dwell_rounds must be at least 0, got {dwell_rounds}")
        if not 0 <= hysteresis < 1:
            raise ValueError(f"hysteresis must be in [0, 1), got {hysteresis}")
        self.choices = np.asarray(choices, dtype=np.int64)
        self.costs = costs
        self._prices = prices
        self._dwell = dwell_rounds
        self._hysteresis = hysteresis
        self._gates = RequestGates(max_context)
        self._within: tuple[bool, ...] | None = None  # the requests that may draft now
        self._probes = Probes()
        self._middle = int(choices[(len(choices) + 1) // 2])
        self._since = dwell_rounds  # rounds since the last switch
        self._at = (0, 0)  # row of the choice, column of the price
        self._reason = "off"
        self._drafted = PLAIN_ROUNDS  # rounds at a choice that drafts
        self._price_of_requests = 0.0
        self._curve: Floats = np.zeros(0)  # as of the last comparison
        self._looked: tuple[int, int, bool] | None = None  # load of the last comparison
        self._age = 0  # rounds since then
        self._known = 0  # requests that the present choice was found best for
        self._probe: Budget | None = None
        self._needed = 0.0  # tokens per request that pay for a probe
        self._goodputs: Floats | None = None

    def attach(self, runtime: BudgetRuntime) -> None:
        """Take costs and survivals; raises ValueError if the window lacks a choice."""
        self._runtime = runtime
        window = runtime.survivals
        missing = sorted(set(self.choices.tolist()) - set(window.budgets.tolist()))
        if missing:
            raise ValueError(f"the survival window lacks the budgets {missing}")
        self._rows = np.searchsorted(window.budgets, self.choices)
        self._columns = len(window.prices) if self._prices and runtime.ragged else 1

    def next(self, load: Load) -> Budget:
        """Return the budget of the coming round."""
        self._within = self._gates.within(load)
        drafting = load.num_running if self._within is None else sum(self._within)
        if not drafting:
            return Budget(0, "idle")
        if not self._runtime.costs.ready:
            due = self._probes.due()
            return Budget(self._middle, "probe") if due else Budget(0, "learning")
        if self._runtime.survivals.num_observed < ENOUGH:
            return self._budget(load, Budget(self._middle, "learning"), 0.0)
        self._age += 1
        self._since += 1
        if self._age >= LOOK_EVERY or self._looked != (
            load.num_running,
            drafting,
            load.num_queued > 0,
        ):
            self._look(load, drafting)
        row, column = self._at
        if row == 0:
            if self._probe is not None and self._probes.due():
                return self._budget(load, self._probe, 0.0)
            return Budget(0, self._reason)
        self._drafted += 1
        if self._drafted % PLAIN_EVERY < PLAIN_ROUNDS:
            return Budget(0, "probe")
        price = float(self._runtime.survivals.prices[column])
        budget = Budget(int(self.choices[row]), self._reason, price)
        return self._budget(load, budget, self._price_of_requests)

    def _budget(self, load: Load, budget: Budget, price: float) -> Budget:
        """The budget with what it means for single requests."""
        factors = self._runtime.survivals.requests
        limits = self._gates.budgets(
            load, self._within, budget.draft_budget, price, self._curve, factors
        )
        if limits is None:
            return budget
        return Budget(budget.draft_budget, budget.reason, budget.min_survival, limits)

    def _look(self, load: Load, drafting: int) -> None:
        """Compare the choices and go to the best one, if that is worth it."""
        running = load.num_running
        self._age, self._looked = 0, (running, drafting, load.num_queued > 0)
        emitted, drafts = self._runtime.survivals.expected()
        emitted, drafts = emitted[self._rows, : self._columns], drafts[self._rows, : self._columns]
        if self._runtime.ragged:
            width = 1 + drafts * (drafting / running)
        else:
            width = np.asarray(1.0 + self.choices, dtype=np.float64)[:, None]
        costs = self._runtime.costs
        milliseconds = costs.step_ms(running, load.mean_context, self.choices, width)
        tokens = running + drafting * (emitted - 1)
        goodputs = tokens / milliseconds
        self._goodputs = goodputs
        excess = self._excess(load, drafting, milliseconds, emitted)
        best = self._best(goodputs, excess, 0)
        self._consider(best, goodputs, excess, running)
        self._explain(best, goodputs)
        self._price_of_requests = 0.0
        if self._runtime.ragged and self._at[0]:
            self._price_of_requests = self._marginal_price(load, width, goodputs)
            self._curve = self._runtime.survivals.curve
        self._plan_probe(goodputs, milliseconds, excess, running, drafting)

    def _marginal_price(self, load: Load, width: Floats, goodputs: Floats) -> float:
        """Tokens that the time of one more node costs: what a draft must be worth at least."""
        row = self._at[0]
        nodes = max(float(width[self._at]), 2.0)
        budgets, widths = self.choices[row : row + 1], np.array([[nodes, 1.0]])
        spent = self._runtime.costs.step_ms(load.num_running, load.mean_context, budgets, widths)
        per_node = (spent[0, 0] - spent[0, 1]) / ((nodes - 1) * load.num_running)
        return float(per_node * goodputs[self._at])

    def _excess(
        self, load: Load, drafting: int, milliseconds: Floats, emitted: Floats
    ) -> Floats | None:
        """How far each choice exceeds its targets: up to 1 meets them [C, L]; None: no targets."""
        return None

    def _best(self, goodputs: Floats, excess: Floats | None, first: int) -> tuple[int, int]:
        """Row and column of the best choice from row `first` on; of equal ones the smallest."""
        values = goodputs[first:]
        if excess is not None:
            over = excess[first:]
            values = np.where(over <= 1, values, -np.inf) if (over <= 1).any() else -over
        row, column = divmod(int(values.argmax()), values.shape[1])
        return row + first, column

    def _consider(
        self, best: tuple[int, int], goodputs: Floats, excess: Floats | None, running: int
    ) -> None:
        if best == self._at:
            self._known = running
            return
        gain = goodputs[best] / goodputs[self._at] - 1
        if excess is not None and excess[self._at] > (1 + self._hysteresis) * max(
            1.0, excess[best]
        ):
            worth = True
        else:
            known = max(self._known, 1)
            burst = max(running / known, known / running) >= BURST
            may = self._since >= self._dwell or gain > LARGE_GAIN or burst
            worth = may and gain > self._hysteresis
        if not worth:
            return
        if best[0] == 0 or self._at[0] == 0:
            self._probes.reset()
        self._at, self._since, self._known = best, 0, running

    def _explain(self, best: tuple[int, int], goodputs: Floats) -> None:
        if best != self._at:
            self._reason = "hold"
        elif best != self._best(goodputs, None, 0):
            self._reason = "slo"
        else:
            self._reason = "goodput" if best[0] else "off"

    def _plan_probe(
        self,
        goodputs: Floats,
        milliseconds: Floats,
        excess: Floats | None,
        running: int,
        drafting: int,
    ) -> None:
        """The best choice that drafts, and what it must emit to beat plain decoding."""
        if self._at[0]:
            self._probe = None
            return
        best = self._best(goodputs, excess, 1)
        if excess is not None and excess[best] > 1:
            self._probe = None
            return
        # Without a price: it would hide the outcomes that the probe is for.
        self._probe = Budget(int(self.choices[best[0]]), "probe")
        tokens = goodputs[0, 0] * milliseconds[best[0], 0] * (1 + self._hysteresis)
        self._needed = 1 + (float(tokens) - running) / drafting

    def observe(self, record: RoundRecord) -> None:
        """Learn whether a probe paid; costs and survivals learn by themselves."""
        asked = record.num_asked
        if record.reason != "probe" or not asked or self._probe is None:
            return
        if 1 + sum(record.num_correct) / asked >= self._needed:
            self._probes.paid()

    @property
    def state(self) -> Mapping[str, Any]:
        """The choice, and predicted tokens per second of every budget at its best price."""
        row, column = self._at
        made: dict[str, Any] = {
            "choice": int(self.choices[row]),
            "price": float(self._runtime.survivals.prices[column]),
            "rounds_since_switch": self._since,
            "probe_wait": None if row else self._probes.wait,
        }
        if self._goodputs is not None:
            best = self._goodputs.max(axis=1) * 1000
            made["tokens_per_second"] = {
                str(choice): round(value, 1)
                for choice, value in zip(self.choices.tolist(), best.tolist(), strict=True)
            }
        return made
