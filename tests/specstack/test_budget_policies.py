"""Fixed and table policies answer from the load alone."""

from __future__ import annotations

import pytest

from specstack.budget.base import Load
from specstack.budget.fixed import FixedPolicy
from specstack.budget.table import TablePolicy

ROWS = [{"max_batch": 2, "draft_budget": 15}, {"max_batch": 8, "draft_budget": 3}]


@pytest.mark.parametrize("num_running", [0, 1, 1000])
def test_fixed_ignores_the_load(num_running):
    budget = FixedPolicy(7).next(Load(num_running))
    assert (budget.draft_budget, budget.reason) == (7, "fixed")


@pytest.mark.parametrize(
    ("num_running", "draft_budget", "reason"),
    [
        (0, 15, "batch<=2"),
        (2, 15, "batch<=2"),
        (3, 3, "batch<=8"),
        (8, 3, "batch<=8"),
        (9, 0, "batch>8"),
    ],
)
def test_table_takes_the_first_row_that_fits(num_running, draft_budget, reason):
    budget = TablePolicy(ROWS).next(Load(num_running))
    assert (budget.draft_budget, budget.reason) == (draft_budget, reason)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "a budget table needs at least one row"),
        (ROWS[::-1], "max_batch must rise from row to row, got [8, 2]"),
        ([{"max_batch": 0, "draft_budget": 1}], "max_batch must rise from row to row, got [0]"),
        ([{"max_batch": 1, "draft_budget": -1}], "draft_budget must be at least 0 in every row"),
    ],
)
def test_table_refuses_bad_rows(rows, message):
    with pytest.raises(ValueError, match="^" + message.replace("[", r"\[")):
        TablePolicy(rows)


def test_fixed_refuses_a_negative_budget():
    with pytest.raises(ValueError, match="draft_budget must be at least 0, got -1"):
        FixedPolicy(-1)
