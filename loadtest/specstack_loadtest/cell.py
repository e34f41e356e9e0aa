"""One side in one phase, all repeats together: its distributions, rates and server metrics.

The repeats' values are pooled; draws take conversations of any repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specstack_loadtest import answers
from specstack_loadtest.arrivals import Phase
from specstack_loadtest.estimates import (
    Distribution,
    Draws,
    Estimate,
    Stretches,
    distribution,
    rate,
    share,
)
from specstack_loadtest.records import RequestRecord
from specstack_loadtest.runs import Part, Run, pooled
from specstack_loadtest.scenario import Slo
from specstack_loadtest.server_metrics import PhaseMetrics

Measure = Callable[[RequestRecord], float | None]

LATENCIES: dict[str, Measure] = {
    "ttft_ms": answers.ttft_s,
    "tpot_ms": answers.tpot_s,
    "e2e_ms": answers.end_to_end_s,
}
"""By name, in seconds: those of which a request has one."""


@dataclass(frozen=True)
class Cell:
    """A side in a phase."""

    side: str
    phase: Phase
    parts: tuple[Part, ...]
    """One per repeat that has something of the phase; not empty."""

    @classmethod
    def of(cls, side: str, phase: Phase, runs: Sequence[Run]) -> Cell | None:
        """None: no run of the side has anything of the phase."""
        parts = [Part.of(run, phase) for run in runs if run.side == side]
        kept = tuple(part for part in parts if part is not None)
        return cls(side, phase, kept) if kept else None

    @property
    def label(self) -> str:
        """Seeds what is drawn of it."""
        return f"{self.side}/{self.phase.number}"

    @property
    def records(self) -> list[RequestRecord]:
        """All that count."""
        return [record for part in self.parts for record in part.records]

    @cached_property
    def seconds(self) -> float:
        """Measured, over all repeats."""
        return sum(part.seconds for part in self.parts)

    @cached_property
    def tokens(self) -> Stretches:
        """Output tokens by stretches of time."""
        return pooled(part.tokens() for part in self.parts)

    @cached_property
    def metrics(self) -> list[PhaseMetrics]:
        """Of each repeat."""
        return [PhaseMetrics(part.scrapes()) for part in self.parts]

    def answered(self) -> list[tuple[int, RequestRecord]]:
        """(conversation, record) of whole answers; conversations of each repeat are others."""
        return [
            (self._conversations[part.run.repeat, record.index], record)
            for part in self.parts
            for record in part.records
            if record.error is None
        ]

    @cached_property
    def _conversations(self) -> dict[tuple[int, int], int]:
        found = {(part.run.repeat, r.index) for part in self.parts for r in part.records}
        return {key: number for number, key in enumerate(sorted(found))}

    @cached_property
    def _draws(self) -> Draws:
        return Draws(max(1, len(self._conversations)), self.label)

    def of_requests(self, measure: Measure) -> Distribution:
        """Of one value per whole answer, where it has one."""
        found = [(group, measure(record)) for group, record in self.answered()]
        kept = [(group, value) for group, value in found if value is not None]
        return distribution([v for _, v in kept], [group for group, _ in kept], self._draws)

    @cached_property
    def latencies(self) -> dict[str, Distribution]:
        """Of each of `LATENCIES`."""
        return {name: self.of_requests(measure) for name, measure in LATENCIES.items()}

    @cached_property
    def gaps(self) -> Distribution:
        """Between chunks of whole answers."""
        found = [(group, answers.gaps_s(record)) for group, record in self.answered()]
        if not found:
            return distribution([], [], self._draws)
        groups = np.repeat([group for group, _ in found], [len(gaps) for _, gaps in found])
        return distribution(np.concatenate([gaps for _, gaps in found]), groups, self._draws)

    def tokens_per_s(self) -> Estimate:
        """All that arrived."""
        return rate(self.tokens, f"{self.label}/tokens")

    def answers_per_s(self) -> Estimate:
        """Whole answers that ended."""
        return rate(pooled(part.answers() for part in self.parts), f"{self.label}/answers")

    def good(self, slo: Slo) -> dict[str, Any] | None:
        """Answers within the bounds, per second and as a share; None: there are no bounds."""
        if slo.ttft_ms is None and slo.tpot_ms is None:
            return None
        records = self.records
        num_good = sum(answers.is_good(record, slo) for record in records)
        part = share(num_good, len(records), len(self._conversations))
        return {
            "good": num_good,
            "per_s": num_good / self.seconds,
            "share": part.as_data(),
        }

    def finish_reasons(self) -> dict[str, int]:
        """Why whole answers ended."""
        found = Counter(record.finish_reason or "unknown" for _, record in self.answered())
        return dict(sorted(found.items()))

    def tokens_per_chunk(self) -> str:
        """Whether tokens of chunks are the server's count: reported, estimated, or mixed."""
        said = {answers.says_tokens_per_chunk(record) for record in self.records if record.chunk_s}
        if not said:
            return "none"
        return "mixed" if len(said) > 1 else "reported" if said.pop() else "estimated"
