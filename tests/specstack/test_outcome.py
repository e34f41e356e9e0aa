"""What a round leaves behind: its record, and what of it must travel to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from specstack.outcome import HostCopy, RoundOutcome
from specstack.types import AcceptResult, DraftTree

FACTS = {
    "num_requests": 2, "draft_budget": 0, "reason": "off", "num_draft_tokens": 1,
    "draft_seconds": 0.0, "build_seconds": 0.0, "verify_seconds": 0.01, "accept_seconds": 0.0,
}  # fmt: skip


class HostTensor(Tensor):
    """One that is where the host can read it."""

    def to(self, *args: object, **kwargs: object) -> Tensor:
        raise AssertionError("it is there")


def test_what_is_on_the_host_is_not_sent_there() -> None:
    here = torch.arange(3).as_subclass(HostTensor)
    assert HostCopy(here).tolist() == [0, 1, 2]


def test_a_record_takes_what_its_caller_knows() -> None:
    accepted = AcceptResult(
        torch.tensor([[0], [0]]), torch.tensor([1, 1]), torch.tensor([[5], [6]])
    )
    tree = DraftTree.root_only(torch.tensor([3, 4]))
    outcome = RoundOutcome.of(tree, accepted, FACTS, [True, False], [False, False])
    record = outcome.record(request_ids=("a", "b"), kv_usage=0.5)
    assert (record.request_ids, record.kv_usage) == (("a", "b"), 0.5)
    assert (record.num_correct, record.num_opted_out, record.num_gated) == ((0, 0), 1, 1)
    assert outcome.record([True, False]).request_ids == ()
