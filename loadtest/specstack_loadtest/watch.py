"""Follows a run while it goes on: numbers of the moment, and whether the server is still there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from specstack_loadtest.answers import ttft_s
from specstack_loadtest.arrivals import phases_of
from specstack_loadtest.progress import Snapshot
from specstack_loadtest.records import RequestRecord
from specstack_loadtest.scenario import Scenario
from specstack_loadtest.shares import phase_at
from specstack_loadtest.tail import CLIENT, REQUESTS, FolderTail

RECENT_S = 10.0
"""What numbers of the moment are about."""
GONE_S, GONE_REQUESTS = 5.0, 3
"""A server is gone when no request could connect for so long, and so many tried."""


class Watch:
    """What the files of the workers say so far."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._phases = phases_of(scenario)
        self._new_records = FolderTail(folder, REQUESTS)
        self._new_samples = FolderTail(folder, CLIENT)
        self._recent: deque[RequestRecord] = deque()
        self._in_flight: dict[int, int] = {}
        self._unreachable: list[float] = []
        self._num_done = self._num_errors = 0
        self._num_turns = scenario.workload.turns
        self._num_turns_over = 0
        """Ended, or never to come: an error ends its conversation."""

    def look(self, now_s: float, draft_budget: float | None) -> Snapshot:
        """Read what is new."""
        for data in self._new_records:
            self._take(RequestRecord.of(data))
        for sample in self._new_samples:
            self._in_flight[sample["worker"]] = sample["in_flight"]
        while self._recent and self._recent[0].end_s < now_s - RECENT_S:
            self._recent.popleft()
        phase = phase_at(self._phases, now_s)
        answered = [record for record in self._recent if record.error is None]
        return Snapshot(
            seconds=now_s,
            phase=None if phase is None else phase.number,
            share_done=self._share_done(now_s),
            num_done=self._num_done,
            num_errors=self._num_errors,
            num_in_flight=sum(self._in_flight.values()) if self._in_flight else None,
            tokens_per_s=_tokens_per_s(answered, now_s),
            ttft_p50_s=median(first) if (first := _known(map(ttft_s, answered))) else None,
            draft_budget=None if draft_budget is None else round(draft_budget),
        )

    @property
    def is_server_gone(self) -> bool:
        """Whether all requests of the last seconds found nobody to connect to."""
        failed = self._unreachable
        return len(failed) >= GONE_REQUESTS and failed[-1] - failed[0] >= GONE_S

    def _take(self, record: RequestRecord) -> None:
        self._num_done += 1
        self._num_errors += record.error is not None
        self._num_turns_over += 1 if record.error is None else self._num_turns - record.turn
        self._recent.append(record)
        if record.error == "connect":
            self._unreachable.append(record.end_s)
        elif record.chunk_s:
            self._unreachable.clear()

    def _share_done(self, now_s: float) -> float | None:
        last = self._phases[-1]
        if last.ends_s is not None:
            return min(max(now_s / last.ends_s, 0.0), 1.0)
        return self._num_turns_over / (last.requests * self._num_turns) if last.requests else None


def _tokens_per_s(answered: Iterable[RequestRecord], now_s: float) -> float | None:
    tokens = [r.output_tokens for r in answered if r.output_tokens is not None]
    return sum(tokens) / min(RECENT_S, now_s) if tokens and now_s > 0 else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
