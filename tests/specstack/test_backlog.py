"""Features of rounds that decoded plainly wait, and a drafter cannot tell that they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from head_bench import CASES, NUM_KV_SLOTS, Bench

from specstack.drafters import backlog as backlog_module
from specstack.drafters.backlog import Backlog, joined
from specstack.types import CommittedTokens, DraftProposal

SLOTS = [6, 0, 3]


class Rounds:
    """A prompt that has been absorbed, and plain rounds that have not."""

    def __init__(self, case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = Bench(case, folder)
        free = torch.randperm(NUM_KV_SLOTS).tolist()
        self.requests = [self.bench.request(n, free[10 * i :]) for i, n in enumerate((5, 4, 7))]
        self.lengths = [request.length for request in self.requests]
        num_rounds = min(self.lengths) - 1
        self.start = [length - num_rounds for length in self.lengths]
        self.rounds: list[CommittedTokens] = []
        with monkeypatch.context() as patched:
            patched.setattr(self.bench.drafter, "absorb", self.rounds.append)
            for done in range(num_rounds):
                before = [start + done for start in self.start]
                after = [length + 1 for length in before]
                self.bench.absorb(self.requests, SLOTS, before, after)

    def proposal(self, absorb: Any) -> DraftProposal:
        """What is drafted after the prompt and what `absorb` hands over."""
        self.bench.poison()
        self.bench.absorb(self.requests, SLOTS, [0] * 3, self.start)
        absorb(self.rounds)
        batch = self.bench.batch(self.requests, SLOTS, self.lengths)
        return self.bench.drafter.propose(batch, 6)

    def at_once(self, rounds: list[CommittedTokens]) -> None:
        """As without a backlog."""
        for one in rounds:
            self.bench.drafter.absorb(one)


@pytest.mark.parametrize("case", CASES)
def test_a_drafter_cannot_tell_that_rounds_waited(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(case, tmp_path, monkeypatch)
    assert len(rounds.rounds) >= 2
    at_once = rounds.proposal(rounds.at_once)

    def waiting(committed: list[CommittedTokens]) -> None:
        backlog = Backlog(rounds.bench.drafter)
        for one in committed:
            backlog.add(one)
        backlog.flush()

    later = rounds.proposal(waiting)
    assert torch.equal(at_once.tokens, later.tokens)
    assert torch.equal(at_once.parent_index, later.parent_index)
    torch.testing.assert_close(at_once.log_q, later.log_q)

    def forgetful(committed: list[CommittedTokens]) -> None:
        """Control: the last round but one is lost."""
        waiting([*committed[:-2], committed[-1]])

    lost = rounds.proposal(forgetful)
    assert not torch.allclose(at_once.log_q, lost.log_q, equal_nan=False)


class Listener:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.heard: list[CommittedTokens] = []

    def absorb(self, committed: CommittedTokens) -> None:
        self.heard.append(committed)


def committed_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CommittedTokens]:
    return Rounds(next(iter(CASES)), tmp_path, monkeypatch).rounds


def test_rounds_of_another_batch_are_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = committed_rounds(tmp_path, monkeypatch)
    other = CommittedTokens(**{**vars(second), "batch": second.batch.select([0, 2])})
    listener = Listener()
    backlog = Backlog(listener)  # type: ignore[arg-type]
    backlog.add(first)
    backlog.add(other)
    assert listener.heard == [first], "what waited went before"
    backlog.flush()
    assert listener.heard == [first, other]
    backlog.flush()
    assert len(listener.heard) == 2


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = committed_rounds(tmp_path, monkeypatch)
    monkeypatch.setattr(backlog_module, "MAX_WAITING_TOKENS", 2 * len(first.next_tokens))
    listener = Listener()
    backlog = Backlog(listener)  # type: ignore[arg-type]
    backlog.add(first)
    assert not listener.heard
    backlog.add(second)
    assert len(listener.heard) == 1
    assert len(listener.heard[0].next_tokens) == 2 * len(first.next_tokens)


def test_joined_rounds_follow_the_first_ones_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = committed_rounds(tmp_path, monkeypatch)[:2]
    whole = joined(rounds)
    assert whole.batch is rounds[0].batch
    assert whole.max_new_tokens == sum(one.max_new_tokens for one in rounds)
    assert whole.positions.tolist() == [p for one in rounds for p in one.positions.tolist()]
