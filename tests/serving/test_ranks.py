"""Ranks propose the same, whatever each has computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from specstack.drafters.base import FeatureDrafter, FeatureNeeds
from specstack.types import DraftBatch, DraftProposal
from specstack_serving.ranks import AgreedDrafter


class Group:
    """What `AgreedDrafter` uses of SGLang's group."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        dist.broadcast(tensor, src=src)
        return tensor


class RankDrafter(FeatureDrafter):
    """Rounds differently on every rank."""

    needs = FeatureNeeds((0,), ())

    def __init__(self, rank: int, has_sources: bool) -> None:
        self._rank, self._has_sources = rank, has_sources

    def attach(self, runtime: Any) -> None: ...

    def absorb(self, committed: Any) -> None: ...

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        tokens = torch.arange(draft_budget)[None] + 10 * self._rank
        parents = torch.arange(-1, draft_budget - 1)[None]
        sources = torch.full_like(tokens, 1 + self._rank, dtype=torch.uint8)
        log_q = -torch.rand(1, draft_budget, generator=torch.Generator().manual_seed(self._rank))
        return DraftProposal(tokens, parents, log_q, sources if self._has_sources else None)


def _rank(rank: int, store: str, has_sources: bool, queue: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    drafter = RankDrafter(rank, has_sources)
    batch = DraftBatch((0,), torch.zeros(1, dtype=torch.long), torch.ones(1), torch.ones(1, 1))
    own = drafter.propose(batch, 3)
    agreed = AgreedDrafter(drafter, Group()).propose(batch, 3)
    names = ("tokens", "parent_index", "log_q", "sources")
    queue.put(
        [
            {f: None if (x := getattr(p, f)) is None else (str(x.dtype), x.tolist()) for f in names}
            for p in (own, agreed)
        ]
    )
    dist.destroy_process_group()


@pytest.mark.parametrize("has_sources", [False, True])
def test_every_rank_proposes_what_rank_0_does(tmp_path, has_sources: bool) -> None:
    context = mp.get_context("spawn")
    queue = context.Queue()
    arguments = (str(tmp_path / "store"), has_sources, queue)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    (own, agreed), (other, other_agreed) = queue.get(timeout=120), queue.get(timeout=120)
    for rank in ranks:
        rank.join()
    assert own != other, "control: alone they would drift apart"
    assert agreed == other_agreed
    first = own if own["tokens"][1][0][0] == 0 else other
    assert agreed == first
