"""What a server's scraped metrics say about a part of a run: gauges, and how far counters went.

Names of SGLang, vLLM, llama.cpp and specstack; the prefix of specstack's is the pipeline's choice.
Nothing is made up: what a server does not export is None.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from specstack_loadtest.runs import Scrape

Labels = tuple[tuple[str, str], ...]

DRAFTS = "spec_decode_num_drafts_total"
"""What all exporters of the shared schema have, behind their prefix."""
EMITTED = "emitted_tokens_total"
"""What specstack's alone has; every round adds to it."""
GAUGES: Mapping[str, tuple[Callable[[Iterable[float]], float], tuple[str, ...], str]] = {
    "running": (
        sum,
        ("sglang:num_running_reqs", "vllm:num_requests_running", "llamacpp:requests_processing"),
        "running_requests",
    ),
    "queued": (
        sum,
        ("sglang:num_queue_reqs", "vllm:num_requests_waiting", "llamacpp:requests_deferred"),
        "queued_requests",
    ),
    "kv_usage": (
        max,
        (
            "sglang:token_usage",
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "llamacpp:kv_cache_usage_ratio",
        ),
        "kv_usage",
    ),
    "draft_budget": (max, (), "draft_budget"),
}
"""By what it measures: how series are joined, engines' names, and specstack's without prefix.
Specstack's, which come first, are of the last round. SGLang 0.5.23 writes its own every 40 rounds
and with each prefill, as of before its requests join.
"""
RETRACTED = ("sglang:num_retracted_requests_total", "vllm:num_preemptions_total")
_SERIES = re.compile(r"(?P<name>[^{]+)(?:\{(?P<labels>.*)\})?$", re.DOTALL)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def series(values: Mapping[str, float], name: str) -> dict[Labels, float]:
    """The series of a family by their labels. Of a family that SGLang splits by priority, the
    total alone.
    """
    found = {}
    for key, value in values.items():
        if not key.startswith(name):
            continue
        match = _SERIES.match(key)
        if match and match["name"] == name:
            labels = tuple(sorted(_LABEL.findall(match["labels"] or "")))
            if dict(labels).get("priority", "") == "":
                found[labels] = value
    return found


class PhaseMetrics:
    """The scrapes of a part of a run."""

    def __init__(self, scrapes: Sequence[Scrape]) -> None:
        self.scrapes = tuple(scrapes)
        self._prefix = _prefix(scrapes[-1].values) if scrapes else None

    def own(self, name: str) -> str | None:
        """The full name of a family of the shared schema, or of specstack's."""
        return None if self._prefix is None else self._prefix + name

    def gauge(self, what: str) -> list[tuple[float, float]]:
        """(time, value) of each scrape that has it, by a key of `GAUGES`."""
        join, engines, own = GAUGES[what]
        full = self.own(own)
        sources = [] if full is None else [(full, self._after_rounds)]
        for name, scrapes in (*sources, *((engine, self.scrapes) for engine in engines)):
            found = [(s.t_s, list(series(s.values, name).values())) for s in scrapes]
            if any(values for _, values in found):
                return [(t_s, float(join(values))) for t_s, values in found if values]
        return []

    @property
    def knows_each_round(self) -> bool:
        """Whether running and waiting requests are told as of the last round."""
        names = [self.own(GAUGES[what][2]) for what in ("running", "queued")]
        return all(name and series(self.scrapes[-1].values, name) for name in names)

    @cached_property
    def _after_rounds(self) -> tuple[Scrape, ...]:
        """The first one, and those that a round ended before since the scrape before: without one,
        specstack's gauges stay as they were, however long ago that was.
        """
        emitted = self.own(EMITTED) or ""
        counts = [sum(series(scrape.values, emitted).values()) for scrape in self.scrapes]
        later = zip(self.scrapes[1:], pairwise(counts), strict=True)
        return (*self.scrapes[:1], *(scrape for scrape, (before, now) in later if now != before))

    def increase(self, name: str, by: tuple[str, ...] = ()) -> dict[tuple[str, ...], float] | None:
        """How far counters went from the first scrape to the last one, summed by some labels.

        Returns:
            None: it is not exported, or there are not two scrapes.
        """
        if len(self.scrapes) < 2:
            return None
        first, last = (series(s.values, name) for s in (self.scrapes[0], self.scrapes[-1]))
        if not last:
            return None
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for labels, value in last.items():
            before = first.get(labels, 0.0)
            went = value - before if value >= before else value  # it began again at 0
            found[tuple(dict(labels).get(label, "") for label in by)] += went
        return dict(found)

    def own_increase(
        self, name: str, by: tuple[str, ...] = ()
    ) -> dict[tuple[str, ...], float] | None:
        """As `increase`, of a family of the shared schema or specstack's."""
        full = self.own(name)
        return None if full is None else self.increase(full, by)

    def retracted(self) -> float | None:
        """Requests that lost their place in the KV cache."""
        for name in RETRACTED:
            found = self.increase(name)
            if found is not None:
                return sum(found.values())
        return None


def summed(
    found: Iterable[Mapping[tuple[str, ...], float] | None],
) -> dict[tuple[str, ...], float] | None:
    """Increases of several runs together; None: none of them has it."""
    listed = [one for one in found if one is not None]
    if not listed:
        return None
    total: dict[tuple[str, ...], float] = defaultdict(float)
    for one in listed:
        for key, value in one.items():
            total[key] += value
    return dict(total)


def _prefix(values: Mapping[str, float]) -> str | None:
    """Of the exporter of the shared schema; specstack's before an engine's own."""
    names = {match["name"] for match in map(_SERIES.match, values) if match}
    found = sorted(name.removesuffix(DRAFTS) for name in names if name.endswith(DRAFTS))
    return next((p for p in found if f"{p}{EMITTED}" in names), next(iter(found), None))
