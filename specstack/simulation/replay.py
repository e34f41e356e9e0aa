"""The load of a recorded trace: its requests, when they were first seen, and their lengths."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specstack.metrics.record import RoundRecord
from specstack.simulation.errors import SimulationError
from specstack.simulation.workload import Workload


def recorded_load(records: Iterable[RoundRecord]) -> Workload:
    """Reconstruct the requests of a trace.

    A request arrives when its first round starts (queueing and its prompt are not recorded), its
    prompt is what was committed then without the first token, its answer all that its rounds
    emitted and the first token. Requests that the trace begins or ends within are as long as seen.

    Raises:
        SimulationError: no round holds a request.
    """
    first: dict[str, tuple[float, int]] = {}
    emitted: dict[str, int] = {}
    for record in records:
        ended = record.ended or (0,) * record.num_requests
        rows = zip(record.request_ids, record.context_lens, record.num_correct, ended, strict=True)
        for request, context, correct, is_over in rows:
            if is_over:
                continue
            first.setdefault(request, (record.started_at, context))
            emitted[request] = emitted.get(request, 0) + correct + 1
    if not first:
        raise SimulationError("the trace holds no request")
    begun = min(when for when, _ in first.values())
    order = sorted(first, key=lambda request: first[request][0])
    return Workload(
        "as recorded",
        np.array([max(1, first[request][1] - 1) for request in order]),
        np.array([1 + emitted[request] for request in order]),
        arrivals=np.array([first[request][0] - begun for request in order]),
    )
