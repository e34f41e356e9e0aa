"""Built-in servers: what rounds cost and what drafts are worth, derived from published figures.

`qwen3-8b-h100` follows JetSpec (arXiv 2606.18394): the speedups over plain decoding of Qwen3-8B on
one H100 at batch 1 to 16 and 16 to 128 drafts, and its goodput of 342 and 1162 tokens/s at 1 and 8
requests. It gives neither step times nor accept lengths there; `_derive` says what was assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from specstack.budget.cost_table import CostKey, CostTable
from specstack.simulation.acceptance import AcceptCurve

BATCHES = (1, 2, 4, 8, 16)
BUDGETS = (16, 32, 64, 128)
SPEEDUPS = np.array([
    [1.75, 2.44, 3.50, 4.33],
    [1.63, 2.21, 3.16, 3.81],
    [2.13, 2.62, 3.26, 3.64],
    [2.76, 3.41, 3.49, 3.26],
    [3.10, 3.81, 3.47, 2.80],
])  # fmt: skip
"""[batch, budget]."""
GOODPUT = {1: 342.0, 8: 1162.0}
"""Tokens per second of the tree, by requests in flight."""
ACCEPT_LENGTH_64 = 7.42
"""Of 64 drafts on MATH-500, Table 1 of the paper."""
DRAFT_SHARE = 0.13
"""Of a plain step of one request: one draft pass is 13 to 15 % of a verify pass."""
MARGIN = 1.02
"""Steps rise at least by so much where the figures only say that they do not fall."""


@dataclass(frozen=True)
class Profile:
    """A server to simulate."""

    name: str
    costs: CostTable
    curve: AcceptCurve
    choices: tuple[int, ...]
    ragged: bool


@cache
def qwen3_8b_h100() -> Profile:
    """A GPU server with captured graphs: every request is padded to the budget.

    The context has no influence, as the source varies none.
    """
    lengths, plain_ms = _derive()
    steps = plain_ms[:, None] * np.concatenate(
        [np.ones((len(BATCHES), 1)), lengths / SPEEDUPS], axis=1
    )
    draft = np.full((len(BATCHES), 1 + len(BUDGETS)), DRAFT_SHARE * plain_ms[0])
    draft[:, 0] = 0.0
    table = CostTable.fitted(
        key=CostKey(device="NVIDIA H100", model="Qwen3-8B", drafter="JetSpec",
                    engine="published figures", dtype="bfloat16"),
        num_requests=BATCHES,
        draft_budgets=(0, *BUDGETS),
        contexts=(1024,),
        verify_ms=(steps - draft)[:, :, None],
        draft_ms=draft,
        num_rounds=0,
        command="derived from arXiv 2606.18394",
        measured_at="2026-06-01T00:00:00+00:00",
    )  # fmt: skip
    curve = AcceptCurve(tuple(zip(BUDGETS, lengths.tolist(), strict=True)))
    return Profile("qwen3-8b-h100", table, curve, (0, *BUDGETS), ragged=False)


def _derive() -> tuple[np.ndarray, np.ndarray]:
    """Accept lengths by budget, and milliseconds of a plain step by batch.

    step(batch, budget) = plain(batch) * accept length(budget) / speedup(batch, budget).

    Accept lengths: ACCEPT_LENGTH_64; from budget to budget they grow by the least factor that lets
    no step of any batch fall, times MARGIN. So 3.6, 5.1, 7.4 and 9.4; the paper has 10.8 for 256
    drafts. At batch 16 a step of 16 drafts is then 1.15 plain ones, about the draft pass; at
    batch 1 it is 2: the host is slower there than the device.

    Plain steps: batch * speedup of the best budget / goodput, at batches 1 and 8 (12.7 and 24 ms;
    a slow baseline: the weights alone stream in 4.5 ms). From 2 to 4 to 8 and from 8 to 16 it grows
    by the least factor that lets no step fall as the batch grows, times MARGIN; from 1 to 2 by what
    is left.
    """
    growth = (SPEEDUPS[:, 1:] / SPEEDUPS[:, :-1]).max(axis=0) * MARGIN
    lengths = np.cumprod([1.0, *growth])
    lengths *= ACCEPT_LENGTH_64 / lengths[BUDGETS.index(64)]
    grows = np.maximum((SPEEDUPS[1:] / SPEEDUPS[:-1]).max(axis=1), 1.0) * MARGIN
    at_1, at_8 = (batch * SPEEDUPS[BATCHES.index(batch)].max() * 1000 / rate
                  for batch, rate in GOODPUT.items())  # fmt: skip
    grows[0] = at_8 / at_1 / (grows[1] * grows[2])
    return lengths, at_1 * np.cumprod([1.0, *grows])


PROFILES = {"qwen3-8b-h100": qwen3_8b_h100}
