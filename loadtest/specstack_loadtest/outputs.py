"""Whether sides gave the same answers: greedy ones are determined by the target alone.

Turns after the first one that differs were asked with another history and are left out. Plain
decoding's own repeats are the control: where they differ, the target is not deterministic at this
load, and no side can be. Without a control nothing is known of that, and no difference is held
against a side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specstack_loadtest.estimates import Estimate, share
from specstack_loadtest.records import RequestRecord
from specstack_loadtest.runs import Run

MAX_EXAMPLES = 5

Texts = dict[tuple[int, int], list[RequestRecord]]
"""Whole greedy answers of a run by conversation, in the order of turns."""


@dataclass(frozen=True)
class Agreement:
    """How many answers of two sets of runs differ."""

    num_pairs: int
    num_different: int
    share: Estimate
    examples: tuple[tuple[int, int, int], ...]
    """(phase, index, turn) of the first that differ."""

    def as_data(self) -> dict[str, Any]:
        """The form in summary.json."""
        return {
            "pairs": self.num_pairs,
            "different": self.num_different,
            "share": self.share.as_data(),
            "examples": [list(identity) for identity in self.examples],
        }


def compare_outputs(ours: Sequence[Run], theirs: Sequence[Run]) -> Agreement:
    """Compare each repeat of one side with the same repeat of another."""
    by_repeat = {run.repeat: run for run in theirs}
    pairs = [(run, by_repeat[run.repeat]) for run in ours if run.repeat in by_repeat]
    return _agreement(pairs)


def compare_repeats(runs: Sequence[Run]) -> Agreement | None:
    """Compare the repeats of one side with one another; None: there is only one."""
    return _agreement(list(pairwise(runs))) if len(runs) > 1 else None


def differs_beyond(found: Agreement, control: Agreement | None) -> bool:
    """Whether there are more differences than the control explains; no control explains all."""
    if not found.num_different or control is None or not control.num_pairs:
        return False
    if not control.num_different:
        return True
    assert found.share.low is not None
    return control.share.high is None or found.share.low > control.share.high


def _agreement(pairs: Sequence[tuple[Run, Run]]) -> Agreement:
    found = [pair for one, other in pairs for pair in _compared(one, other)]
    different = sorted({identity for identity, same in found if not same})
    num = sum(not same for _, same in found)
    return Agreement(len(found), num, share(num, len(found)), tuple(different[:MAX_EXAMPLES]))


def _compared(one: Run, other: Run) -> Iterator[tuple[tuple[int, int, int], bool]]:
    """(identity, whether the texts are equal) of what both were asked alike."""
    theirs = _texts(other)
    for conversation, ours in _texts(one).items():
        for a, b in zip(ours, theirs.get(conversation, ()), strict=False):
            same = a.text_sha256 == b.text_sha256
            yield a.identity, same
            if not same:
                break


def _texts(run: Run) -> Texts:
    """The leading turns that were answered; a turn of another temperature ends them."""
    found: Texts = {}
    for record in sorted(run.records, key=lambda r: r.identity):
        before = found.setdefault((record.phase, record.index), [])
        if record.error is None and record.greedy and record.turn == len(before):
            before.append(record)
    return found
