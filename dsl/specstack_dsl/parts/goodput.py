"""The budget with the most tokens per second."""

from __future__ import annotations

from specstack_dsl.parts.budget_options import ComparingBudget


class Goodput(ComparingBudget):
    """Options of the goodput budget."""

    kind = "goodput"
    summary = "Whatever gives the most tokens per second, by measured costs and recent drafts."
    implementation = "specstack.budget.goodput:GoodputPolicy"
