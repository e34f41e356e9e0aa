"""Was the client the bottleneck? What it samples of itself, and the verdict over that.

A client that is late sends later than it says, and reads later than the server wrote: its numbers
are then about itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from specstack_loadtest.records import RequestRecord

SLEEP_S = 0.05
SAMPLE_S = 1.0
MAX_LAG_S = 0.1
"""Most of the 99th percentile of the overshoot of a sleep, and of sending after the due time."""
MIN_TIMES = 3
"""So often it must have been exceeded: in a short run a single hiccup is the 99th percentile."""
MAX_CPU = 0.9
"""Of one core: a worker has one."""
MAX_BUSY_SHARE = 0.1
"""Of the samples that may be above it."""


@dataclass(frozen=True)
class Saturation:
    """Whether the client kept up, and the evidence."""

    saturated: bool
    lag_p99_s: float | None
    late_p99_s: float | None
    """Of sending after the due time."""
    busy_share: float | None
    """Of the samples with more CPU than `MAX_CPU`."""
    sentence: str
    """What was found, and what to do; for people."""


def sample_client(
    file: TextIO,
    worker: int,
    now: Callable[[], float],
    num_in_flight: Callable[[], int],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write a line a second, for ever: the longest overshoot of its sleeps, and its CPU time.

    Every line is flushed. `sleep` has to give way to the greenlets that send.
    """
    while True:
        began, cpu, lag_s = time.monotonic(), time.process_time(), 0.0
        while (before := time.monotonic()) < began + SAMPLE_S:
            sleep(SLEEP_S)
            lag_s = max(lag_s, time.monotonic() - before - SLEEP_S)
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        sample = {
            "t_s": round(now(), 3),
            "worker": worker,
            "lag_s": round(max(lag_s, 0.0), 6),
            "cpu": round(share, 4),
            "in_flight": num_in_flight(),
        }
        file.write(json.dumps(sample) + "\n")
        file.flush()


def verdict(samples: Sequence[Mapping[str, Any]], records: Sequence[RequestRecord]) -> Saturation:
    """Judge a run, or a part of it."""
    lags = [float(sample["lag_s"]) for sample in samples]
    delays = [record.sent_s - record.due_s for record in records]
    lag_s, late_s = _p99(lags), _p99(delays)
    busy = [float(sample["cpu"]) > MAX_CPU for sample in samples]
    busy_share = sum(busy) / len(busy) if busy else None
    found = []
    if lag_s is not None and _is_late(lags, lag_s):
        found.append(f"its sleeps took up to {lag_s * 1000:.0f} ms too long (99th percentile)")
    if late_s is not None and _is_late(delays, late_s):
        found.append(f"requests were sent up to {late_s * 1000:.0f} ms late (99th percentile)")
    if busy_share is not None and busy_share > MAX_BUSY_SHARE:
        found.append(f"its CPU was full for {busy_share:.0%} of the time")
    return Saturation(bool(found), lag_s, late_s, busy_share, _sentence(found, bool(samples)))


def _sentence(found: Sequence[str], is_known: bool) -> str:
    if found:
        return (
            f"The client could not keep up: {'; '.join(found)}. The numbers are about the client"
            " then: give it more --workers, or cores that the server does not use."
        )
    return "The client kept up." if is_known else "The client left no samples of its own load."


def _is_late(values: Sequence[float], p99: float) -> bool:
    return p99 > MAX_LAG_S and sum(value > MAX_LAG_S for value in values) >= MIN_TIMES


def _p99(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None
