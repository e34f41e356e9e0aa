"""How a run went over time: bins of a second, or of more where it was long."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specstack_loadtest.estimates import Floats
from specstack_loadtest.runs import Run
from specstack_loadtest.server_metrics import GAUGES, PhaseMetrics

MAX_BINS = 300


def timeline(run: Run) -> dict[str, Any]:
    """Tokens per second, requests in flight and the server's gauges, one value per bin.

    A gauge is its mean over the scrapes of a bin; None: no scrape. A gauge that the server does not
    export is None as a whole.
    """
    length_s = max(run.ended_s, 1e-3)
    bin_s = max(1, math.ceil(length_s / MAX_BINS))
    edges = np.arange(0, math.ceil(length_s / bin_s) + 1).astype(np.float64) * bin_s
    times, amounts = run.token_arrivals
    tokens, _ = np.histogram(times, edges, weights=amounts)
    metrics = PhaseMetrics(run.scrapes)
    return {
        "side": run.side,
        "repeat": run.repeat,
        "bin_s": bin_s,
        "tokens_per_s": (tokens / bin_s).tolist(),
        "in_flight": (_held(run, edges) / bin_s).tolist(),
        **{what: _binned(metrics.gauge(what), edges) for what in GAUGES},
    }


def _held(run: Run, edges: Floats) -> Floats:
    """Request seconds in each bin."""
    sent = np.array([record.sent_s for record in run.records])[:, None]
    ends = np.array([record.end_s for record in run.records])[:, None]
    until = np.clip(edges - sent, 0, None) - np.clip(edges - ends, 0, None)  # [requests, edges]
    return np.diff(until.sum(axis=0))


def _binned(points: list[tuple[float, float]], edges: Floats) -> list[float | None] | None:
    if not points:
        return None
    times, values = (np.array(column) for column in zip(*points, strict=True))
    sums, _ = np.histogram(times, edges, weights=values)
    counts, _ = np.histogram(times, edges)
    return [
        float(total / count) if count else None for total, count in zip(sums, counts, strict=True)
    ]
