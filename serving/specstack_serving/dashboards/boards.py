"""All dashboards, in the order in which one looks at them."""

from __future__ import annotations

from specstack_serving.dashboards.acceptance import ACCEPTANCE
from specstack_serving.dashboards.budget import BUDGET
from specstack_serving.dashboards.cost import COST
from specstack_serving.dashboards.overview import OVERVIEW

BOARDS = (OVERVIEW, BUDGET, ACCEPTANCE, COST)
