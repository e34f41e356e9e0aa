"""One speculative round, for serving and evaluation alike (architecture, section 3).

propose -> build -> verify -> accept -> commit -> absorb -> record. What touches the target (its
forward, its KV, publishing) is behind `Target`. Emitted tokens start their way to the host at once;
a drafter that reads them catches up at the start of the next round. Around a drafter that reads
features alone nothing waits for the device, and what is counted is read after the round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from specstack.budget.base import Budget
from specstack.drafters.base import Drafter, FeatureNeeds
from specstack.metrics.record import RoundRecord
from specstack.trees.base import TreeBuilder
from specstack.types import (
    AcceptResult,
    CommittedTokens,
    DraftBatch,
    DraftLaw,
    DraftProposal,
    DraftTree,
    NodeLogits,
    SamplingTensors,
    index_on,
)
from specstack.verify.base import VerifyRule

MAX_PENDING = 64
"""Rounds whose tokens may wait on the device; the host waits for them when more do."""
MAX_DRAFTERS = 8
"""Of a merge."""


class Target(Protocol):
    """The target model as one round sees it."""

    def draft_batch(self) -> DraftBatch:
        """The requests of the round, before it, with a `Drawing` for a drafter that draws."""

    def verify(self, tree: DraftTree) -> NodeLogits:
        """Run the target over the trees; logits carry penalties, biases and grammar masks."""

    def sampling(self, num_positions: int) -> SamplingTensors:
        """Sampling settings with `num_positions` uniforms per request."""

    def commit(self, tree: DraftTree, accepted: AcceptResult) -> AcceptResult:
        """Keep the accepted path's KV, agree across ranks and publish the new lengths."""

    def committed(self, tree: DraftTree, accepted: AcceptResult) -> CommittedTokens | None:
        """The features of the path that was just committed; None if none were captured."""


class _HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._done: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._done = torch.Event(tensor.device)
            self._done.record()

    def tolist(self) -> Any:
        """Host sync: waits for what was queued before the copy, and for nothing after it."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()


@dataclass(frozen=True)
class RoundOutcome:
    """What a round leaves to its caller."""

    tree: DraftTree
    accepted: AcceptResult
    _facts: dict[str, Any]
    _drafts_per_depth: _HostCopy
    _num_drafting: _HostCopy
    _per_drafter: _HostCopy | None

    @property
    def record(self) -> RoundRecord:
        """Host sync: waits for the round, if its trees were built on a device."""
        counts = self._drafts_per_depth.tolist()
        while counts and counts[-1] == 0:
            counts.pop()
        drafts, correct = self._per_drafter.tolist() if self._per_drafter else ((), ())
        return RoundRecord(
            num_drafting=self._num_drafting.tolist(),
            nodes_per_depth=tuple(counts),
            drafts_per_drafter=tuple(drafts),
            correct_per_drafter=tuple(correct),
            **self._facts,
        )


@dataclass(frozen=True)
class _Emitted:
    """Tokens that the host has not seen yet."""

    slots: tuple[int, ...]
    emitted: _HostCopy
    accept_lens: _HostCopy


class Speculator:
    """Drafter, tree builder and verification rule of one plan, and the tokens per slot."""

    def __init__(
        self,
        drafter: Drafter,
        tree_builder: TreeBuilder,
        verify_rule: VerifyRule,
        verify_widths: Sequence[int],
    ) -> None:
        self._drafter = drafter
        self._tree_builder = tree_builder
        self._verify_rule = verify_rule
        self._verify_widths = sorted(verify_widths)
        self._outputs: dict[int, list[int]] = {}
        self._pending: list[_Emitted] = []

    @property
    def needs(self) -> FeatureNeeds | None:
        """The features that `absorb` wants; None: it must not be called."""
        return self._drafter.needs

    def begin(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Start a request in `slot`; `output` is what it emitted before a retraction."""
        self._catch_up()
        self._outputs[slot] = list(output)
        if self._drafter.needs_tokens:
            self._drafter.begin(slot, [*prompt, *output])

    def absorb(self, committed: CommittedTokens) -> None:
        """Hand over the features of a prefill; `round` does it with its own. Host sync: none."""
        self._drafter.absorb(committed)

    def emitted(self, slots: Sequence[int], tokens: Tensor, accept_lens: Tensor) -> None:
        """Queue emitted tokens ([B, K], [B]). Host sync: none on this round or those after it."""
        if len(self._pending) == MAX_PENDING:  # nobody asked for long
            self._catch_up()
        self._pending.append(_Emitted(tuple(slots), _HostCopy(tokens), _HostCopy(accept_lens)))

    def output_tokens(self, slot: int) -> list[int]:
        """All tokens that the request in `slot` has emitted. Waits for the last round."""
        self._catch_up()
        return self._outputs[slot]

    def accept(
        self, tree: DraftTree, logits: NodeLogits, sampling: SamplingTensors
    ) -> AcceptResult:
        """Apply the verification rule alone."""
        max_depth = sampling.uniforms.shape[1] - 1
        return self._verify_rule.accept(tree, logits, sampling, max_depth=max_depth)

    def round(
        self,
        slots: Sequence[int],
        bonus_tokens: Int[Tensor, " B"],
        speculate: Sequence[bool],
        budget: Budget,
        target: Target,
    ) -> RoundOutcome:
        """Run one round.

        Args:
            bonus_tokens: the roots.
            speculate: False for requests that opted out; they ride along with the root alone.
        """
        started = time.perf_counter()
        proposal = self._propose(target, speculate, budget.draft_budget)
        proposed = time.perf_counter()
        tree, counts = self._build(proposal, bonus_tokens, budget)
        built = time.perf_counter()
        logits = target.verify(tree)
        verified = time.perf_counter()
        max_depth = min(tree.num_draft_tokens - 1, self._tree_builder.depth)
        accepted = self.accept(tree, logits, target.sampling(max_depth + 1))
        accepted = target.commit(tree, accepted)
        self.emitted(slots, accepted.emitted, accepted.accept_lens)
        finished = time.perf_counter()
        self._absorb(target, tree, accepted)
        facts = {
            "num_requests": len(slots),
            "num_opted_out": len(slots) - sum(speculate),
            "draft_budget": budget.draft_budget,
            "reason": budget.reason,
            "num_draft_tokens": tree.num_draft_tokens,
            "draft_seconds": proposed - started + time.perf_counter() - finished,
            "build_seconds": built - proposed,
            "verify_seconds": verified - built,
            "accept_seconds": finished - verified,
        }
        return RoundOutcome(tree, accepted, facts, *counts, _per_drafter(tree, accepted))

    def _propose(
        self, target: Target, speculate: Sequence[bool], draft_budget: int
    ) -> DraftProposal | None:
        if draft_budget == 0 or not any(speculate):
            return None
        if self._drafter.needs_tokens:
            self._catch_up()
        batch = target.draft_batch()
        if all(speculate):
            return self._drafter.propose(batch, draft_budget)
        active = batch.select([row for row, wanted in enumerate(speculate) if wanted])
        return _spread(self._drafter.propose(active, draft_budget), speculate)

    def _build(
        self, proposal: DraftProposal | None, bonus_tokens: Int[Tensor, " B"], budget: Budget
    ) -> tuple[DraftTree, tuple[_HostCopy, _HostCopy]]:
        """Build the trees where the candidates are, in the narrowest verify width that fits.

        Host sync: none. How full the trees are is known, and used, on the host alone.
        """
        assert budget.draft_budget + 1 in self._verify_widths, (
            "a budget that the plan does not know"
        )
        if proposal is None:
            tree = DraftTree.root_only(bonus_tokens)
            return tree, _counts(tree, self._tree_builder.depth)
        allowed = min(budget.draft_budget, proposal.tokens.shape[1])
        tree = self._tree_builder.build(
            proposal,
            bonus_tokens.to(proposal.tokens.device),
            self._width(1 + allowed) - 1,
            budget.min_survival,
        )
        if tree.tokens.device.type == "cpu":
            tree = tree.narrow(self._width(int(tree.num_nodes.max())))
        return tree.to(bonus_tokens.device), _counts(tree, self._tree_builder.depth)

    def _absorb(self, target: Target, tree: DraftTree, accepted: AcceptResult) -> None:
        """Whatever the budget: a drafter that skips a round would draft from a hole."""
        if self._drafter.needs is None:
            return
        committed = target.committed(tree, accepted)
        if committed is not None:
            self._drafter.absorb(committed)

    def _width(self, num_nodes: int) -> int:
        """The narrowest verify width that holds `num_nodes`."""
        return next(width for width in self._verify_widths if width >= num_nodes)

    def _catch_up(self) -> None:
        """Hand the drafter what has been emitted since. Waits for the rounds that emitted it."""
        for item in self._pending:
            rows = item.emitted.tolist()
            for slot, row, length in zip(item.slots, rows, item.accept_lens.tolist(), strict=True):
                tokens = row[:length]
                self._outputs[slot].extend(tokens)
                if self._drafter.needs_tokens:
                    self._drafter.observe(slot, tokens)
        self._pending.clear()


def _counts(tree: DraftTree, max_depth: int) -> tuple[_HostCopy, _HostCopy]:
    """Live drafts at depth 1, 2, .. over all requests, and requests that have any."""
    node = torch.arange(tree.num_draft_tokens, device=tree.tokens.device)
    is_live = node < tree.num_nodes[:, None]
    per_depth = torch.zeros(max_depth + 1, dtype=torch.int64, device=node.device)
    per_depth.scatter_add_(0, tree.depth.reshape(-1), is_live.reshape(-1).long())
    return _HostCopy(per_depth[1:]), _HostCopy((tree.num_nodes > 1).sum())


def drafters_of(
    sources: Int[Tensor, "B N"], accept_index: Int[Tensor, "B K"]
) -> tuple[Int[Tensor, "B N MAX_DRAFTERS"], Int[Tensor, "B K MAX_DRAFTERS"]]:
    """1 where a drafter of a merge proposed a draft of a tree, and of a path. Host sync: none."""
    bits = torch.arange(MAX_DRAFTERS, device=sources.device)
    is_from = (sources[..., None] >> bits) & 1  # 0 at the root
    path = accept_index[..., None]
    on_path = is_from.gather(1, path.clamp(min=0).expand(-1, -1, MAX_DRAFTERS)) * (path >= 0)
    return is_from, on_path


def _per_drafter(tree: DraftTree, accepted: AcceptResult) -> _HostCopy | None:
    """Live drafts and correct drafts of each drafter of a merge, [2, MAX_DRAFTERS]."""
    if tree.sources is None:
        return None
    is_from, on_path = drafters_of(tree.sources, accepted.accept_index)
    return _HostCopy(torch.stack([is_from.sum((0, 1)), on_path.sum((0, 1))]))


def _spread(proposal: DraftProposal, speculate: Sequence[bool]) -> DraftProposal:
    """Give every request that opted out a row without candidates."""
    speculating = [row for row, wanted in enumerate(speculate) if wanted]
    rows = index_on(speculating, proposal.tokens.device)

    def spread(values: Tensor, missing: float) -> Tensor:
        spread_out = values.new_full((len(speculate), *values.shape[1:]), missing)
        spread_out[rows] = values
        return spread_out

    sources, law = proposal.sources, proposal.law
    return DraftProposal(
        spread(proposal.tokens, 0),
        spread(proposal.parent_index, -1),
        spread(proposal.log_q, float("-inf")),
        None if sources is None else spread(sources, 0),
        law and DraftLaw(spread(law.tokens, 0), spread(law.probs, 0)),
    )
