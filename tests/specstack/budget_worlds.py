"""A made-up engine for budget policies: drafts of known worth, rounds of known length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specstack.budget.base import Budget, BudgetPolicy, BudgetRuntime, Load
from specstack.budget.costs import CostKey, CostModel, CostTable
from specstack.budget.survival import SurvivalWindow
from specstack.metrics.record import RoundRecord

CHOICES = (0, 1, 3, 7, 15)
REQUESTS = (1, 2, 4, 8, 16, 32, 64)


def cost_table(base: float = 20.0, per_token: float = 0.3, draft: float = 1.0) -> CostTable:
    """Times that rise with requests x nodes; contexts cost nothing."""
    verify = [[[base + per_token * r * (1 + w)] * 2 for w in CHOICES] for r in REQUESTS]
    drafting = [[0.0 if w == 0 else draft + 0.01 * r * w for w in CHOICES] for r in REQUESTS]
    return CostTable.fitted(
        key=CostKey(device="d", model="m", drafter="n", engine="e", dtype="f"),
        num_requests=REQUESTS,
        draft_budgets=CHOICES,
        contexts=(64, 4096),
        verify_ms=np.array(verify),
        draft_ms=np.array(drafting),
        num_rounds=100,
        command="test",
    )


def chain_rows(alphas: Sequence[float], width: int) -> NDArray[np.float32]:
    """Survivals of chains whose drafts are correct with probability alpha each [B, S]."""
    depth = np.arange(1, width + 1)
    return np.asarray([[alpha**d for d in depth] for alpha in alphas], dtype=np.float32)


def record(
    budget: int,
    survivals: NDArray[np.float32],
    correct: Sequence[int],
    *,
    price: float = 0.0,
    reason: str = "test",
    num_opted_out: int = 0,
    request_ids: Sequence[str] | None = None,
) -> RoundRecord:
    """A round over chains [B, S] of which the first `correct` drafts were right."""
    requests = len(survivals)
    least = max(price, 1e-9)
    num_drafts = (survivals >= least).sum(axis=1) if budget else np.zeros(requests, np.int64)
    right = np.minimum(correct, num_drafts)
    places = np.arange(1, max(budget, 1) + 1)
    return RoundRecord(
        num_requests=requests,
        num_opted_out=num_opted_out,
        num_drafting=int((num_drafts > 0).sum()),
        draft_budget=budget,
        reason=reason,
        num_draft_tokens=1 + budget,
        nodes_per_depth=(),
        draft_seconds=0.0,
        build_seconds=0.0,
        verify_seconds=0.0,
        accept_seconds=0.0,
        num_correct=tuple(right.tolist()),
        min_survival=price,
        num_drafts=tuple(num_drafts.tolist()),
        survivals=survivals,
        accept_ranks=np.where(places <= right[:, None], places, 0),
        request_ids=tuple(request_ids or (f"r{row}" for row in range(requests))),
    )


@dataclass
class World:
    """Rounds of `policy` over requests whose drafts are correct with probability alpha each."""

    policy: BudgetPolicy
    table: CostTable | None = field(default_factory=cost_table)
    ragged: bool = True
    claimed: Callable[[float], float] = float
    """What the drafter says of a draft that is correct with probability alpha."""
    seed: int = 0
    half_life: float = 256.0
    budgets: list[Budget] = field(default_factory=list)
    milliseconds: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.costs = CostModel(self.table, ragged=self.ragged)
        self.window = SurvivalWindow(CHOICES, half_life=self.half_life)
        self.policy.attach(BudgetRuntime(self.costs, self.window, self.ragged))
        self.rng = np.random.default_rng(self.seed)

    def load(self, requests: int, **facts: object) -> Load:
        ids = tuple(f"r{row}" for row in range(requests))
        return Load(requests, context_lens=(100,) * requests, request_ids=ids, **facts)  # type: ignore[arg-type]

    def round(self, alphas: Sequence[float], **facts: object) -> Budget:
        """One round; its record arrives before the next one."""
        load = self.load(len(alphas), **facts)
        budget = self.policy.next(load)
        limits = budget.request_budgets or (budget.draft_budget,) * len(alphas)
        wants = load.speculating or (True,) * len(alphas)
        said = chain_rows([self.claimed(a) for a in alphas], budget.draft_budget)
        for row, (want, limit) in enumerate(zip(wants, limits, strict=True)):
            said[row, limit if want else 0 :] = 0
        lengths = self.rng.geometric(1 - np.minimum(alphas, 0.999)) - 1
        made = record(
            budget.draft_budget,
            said,
            lengths,
            price=budget.min_survival,
            reason=budget.reason,
            num_opted_out=wants.count(False),
        )
        width = 1 + np.mean(made.num_drafts) if self.ragged else 1.0 + budget.draft_budget
        if self.table is not None:
            spent = self.costs.step_ms(
                len(alphas), 100.0, np.array([budget.draft_budget]), np.array([[width]])
            )
            self.milliseconds += float(spent[0, 0])
        self.tokens += made.num_emitted
        self.window.observe(made)
        self.policy.observe(made)
        self.budgets.append(budget)
        return budget

    def run(self, rounds: int, alphas: Sequence[float], **facts: object) -> list[Budget]:
        """Rounds at one load."""
        return [self.round(alphas, **facts) for _ in range(rounds)]


def switches(budgets: Sequence[Budget]) -> int:
    """Rounds whose budget differs from that before, probes aside."""
    kept = [budget.draft_budget for budget in budgets if budget.reason != "probe"]
    return sum(a != b for a, b in pairwise(kept))
