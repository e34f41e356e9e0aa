"""What bound a phase: the client, the KV cache, places in the batch, the load itself, or rounds.

The evidence comes as a sentence, so that a reader can judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specstack_loadtest.cell import Cell
from specstack_loadtest.server_view import admission_cap_of

Kind = Literal["client", "admission", "kv", "load", "compute", "unknown"]

NAMES: dict[Kind, str] = {
    "client": "the client",
    "admission": "admission",
    "kv": "the KV cache",
    "load": "the load",
    "compute": "computing",
    "unknown": "unknown",
}
MOST = 0.5
"""Share of scrapes, or of time, that makes a state the rule."""
FULL_KV = 0.95
MANY_LOST = 0.05
"""Lost places in the KV cache per request due, from which on it was too small."""
KEPT_UP = 0.95
"""Answers per request due with which a server kept up."""


@dataclass(frozen=True)
class Bound:
    """What held the numbers of a phase where they are."""

    kind: Kind
    evidence: str

    def as_data(self) -> dict[str, str]:
        """The form in summary.json."""
        return {"kind": self.kind, "name": NAMES[self.kind], "evidence": self.evidence}


@dataclass(frozen=True)
class Signs:
    """What speaks for one or the other."""

    client: str | None
    """Why the client was the bottleneck; None: it was not."""
    num_due: int
    num_answered: int
    """Of those that were due."""
    running: Sequence[float]
    """Per scrape; empty: not exported. So are the next two, each of the same scrapes."""
    queued: Sequence[float]
    kv_usage: Sequence[float]
    retracted: float
    cap: int | None
    over_cap: float | None
    """Share of the time in which the client had more requests in flight than `cap`; None: the
    server tells of each round how many ran, or no cap is known."""
    answered_share: float | None
    """Of an open loop: answers per request due; None: a closed loop."""

    @classmethod
    def of(cls, cell: Cell, client: str | None, answered_share: float | None) -> Signs:
        """Those of a side in a phase."""
        gauges = {
            what: [value for metrics in cell.metrics for _, value in metrics.gauge(what)]
            for what in ("running", "queued", "kv_usage")
        }
        cap = admission_cap_of(cell)
        is_exact = all(metrics.knows_each_round for metrics in cell.metrics)
        return cls(
            client=client,
            num_due=len(cell.records),
            num_answered=len(cell.answered()),
            **gauges,
            retracted=sum(metrics.retracted() or 0.0 for metrics in cell.metrics),
            cap=cap,
            over_cap=None if is_exact or cap is None else _share_of_time_over(cap, cell),
            answered_share=answered_share,
        )


def _share_of_time_over(num: int, cell: Cell) -> float:
    """How long the client had more requests in flight."""
    return sum(part.seconds_over(num) for part in cell.parts) / cell.seconds


def bound_of(signs: Signs) -> Bound:
    """Judge them: what spoils the numbers first, what is left last."""
    if signs.client is not None:
        return Bound("client", signs.client)
    if not signs.num_answered:
        said = "no request was answered" if signs.num_due else "nothing was due"
        return Bound("unknown", said)
    found = _kv(signs) or _admission(signs) or _unknown(signs) or _load(signs) or _compute(signs)
    if found.kind == "kv" or not signs.retracted:
        return found
    return replace(found, evidence=f"{found.evidence}; {_lost(signs)}")


def _kv(signs: Signs) -> Bound | None:
    full = share_of([usage > FULL_KV for usage in signs.kv_usage])
    said = []
    if full > MOST:
        said.append(f"it was more than {_percent(FULL_KV)} full in {_percent(full)} of scrapes")
    if signs.retracted >= MANY_LOST * signs.num_due:
        said.append(_lost(signs))
    return Bound("kv", " and ".join(said)) if said else None


def _lost(signs: Signs) -> str:
    lost = "a request lost its place in the KV cache once"
    if signs.retracted != 1:
        lost = f"requests lost their place in the KV cache {signs.retracted:.0f} times"
    return f"{lost} ({signs.num_due} were due)"


def _admission(signs: Signs) -> Bound | None:
    """By what the server says of each round, else by what the client had in flight: requests beyond
    the cap waited, whatever a gauge said that was written dozens of rounds ago.
    """
    if signs.cap is None:
        return None
    if signs.over_cap is not None:
        if signs.over_cap <= MOST:
            return None
        return Bound(
            "admission",
            f"more requests were in flight than there are places, {signs.cap}, for"
            f" {_percent(signs.over_cap)} of the time (by the client's count: the server's own is"
            " not of each round)",
        )
    at_cap = [
        queued > 0 and running >= signs.cap
        for running, queued in zip(signs.running, signs.queued, strict=True)
    ]
    if share_of(at_cap) <= MOST:
        return None
    return Bound(
        "admission",
        f"all {signs.cap} places were taken while requests waited for one, in"
        f" {_percent(share_of(at_cap))} of {len(at_cap)} scrapes",
    )


def _unknown(signs: Signs) -> Bound | None:
    if len(signs.running) or len(signs.queued):
        return None
    return Bound("unknown", "the server exports neither running nor waiting requests")


def _load(signs: Signs) -> Bound | None:
    if signs.answered_share is None or signs.answered_share < KEPT_UP or _waited(signs) > MOST:
        return None
    return Bound(
        "load",
        f"the server answered {_percent(min(1.0, signs.answered_share))} of what was due in the"
        f" same time; {_waited_words(signs)}",
    )


def _compute(signs: Signs) -> Bound:
    said = [_waited_words(signs)]
    if len(signs.kv_usage):
        said.append(f"the KV cache was at most {_percent(max(signs.kv_usage))} full")
    if _waited(signs) > MOST:
        said.append("how many run at once is not known to be the limit")
    return Bound("compute", "; ".join([*said, "what is left is the time that rounds take"]))


def _waited(signs: Signs) -> float:
    return share_of([queued > 0 for queued in signs.queued])


def _waited_words(signs: Signs) -> str:
    if not len(signs.queued):
        return "it does not say whether requests waited"
    if _waited(signs) == 0:
        return "no request waited for a place in any scrape"
    return f"requests waited for a place in {_percent(_waited(signs))} of scrapes"


def share_of(states: Sequence[bool]) -> float:
    """How many of them are true; 0 of none."""
    return sum(states) / len(states) if states else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
