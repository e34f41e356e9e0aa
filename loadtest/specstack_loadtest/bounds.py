"""What bound a phase: the client, places in the batch, the KV cache, the load itself, or rounds.

The evidence comes as a sentence, so that a reader can judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
"""Share of scrapes that makes a state the rule."""
FULL_KV = 0.95
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
    running: Sequence[float]
    """Per scrape; empty: not exported. So are the next two, each of the same scrapes."""
    queued: Sequence[float]
    kv_usage: Sequence[float]
    retracted: float | None
    cap: int | None
    answered_share: float | None
    """Of an open loop: answers per request due; None: a closed loop."""


def bound_of(signs: Signs) -> Bound:
    """Judge them: what spoils the numbers first, what is left last."""
    if signs.client is not None:
        return Bound("client", signs.client)
    if not len(signs.running) and not len(signs.queued):
        return Bound("unknown", "the server exports neither running nor waiting requests")
    return _admission(signs) or _kv(signs) or _load(signs) or _compute(signs)


def _admission(signs: Signs) -> Bound | None:
    waiting = [queued > 0 for queued in signs.queued]
    if signs.cap is None or len(signs.running) != len(waiting):
        return None
    at_cap = [
        queued and running >= signs.cap
        for running, queued in zip(signs.running, waiting, strict=True)
    ]
    if share_of(at_cap) <= MOST:
        return None
    return Bound(
        "admission",
        f"all {signs.cap} places were taken while requests waited for one, in"
        f" {_percent(share_of(at_cap))} of {len(at_cap)} scrapes",
    )


def _kv(signs: Signs) -> Bound | None:
    full = share_of([usage > FULL_KV for usage in signs.kv_usage])
    said = []
    if full > MOST:
        said.append(f"it was more than {_percent(FULL_KV)} full in {_percent(full)} of scrapes")
    if signs.retracted:
        said.append(f"{signs.retracted:.0f} requests lost their place in it")
    return Bound("kv", " and ".join(said)) if said else None


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
