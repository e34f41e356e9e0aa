"""One speculative round, for serving and evaluation alike (architecture, section 3).

propose -> build -> verify -> accept -> commit -> record. What touches the target (its forward,
its KV, publishing) is behind `Target`; what needs host tokens (the drafter's history) catches up
at the start of the next round, so that nothing here waits for the device in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from specstack.budget.base import Budget
from specstack.drafters.base import Drafter
from specstack.metrics.record import RoundRecord
from specstack.trees.base import TreeBuilder
from specstack.types import AcceptResult, DraftProposal, DraftTree, NodeLogits, SamplingTensors
from specstack.verify.base import VerifyRule

MAX_PENDING = 64
"""Rounds whose tokens may wait on the device; the host waits for them when more do."""


class Target(Protocol):
    """The target model as one round sees it."""

    def verify(self, tree: DraftTree) -> NodeLogits:
        """Run the target over the trees; logits carry penalties, biases and grammar masks."""

    def sampling(self, num_positions: int) -> SamplingTensors:
        """Sampling settings with `num_positions` uniforms per request."""

    def commit(self, tree: DraftTree, accepted: AcceptResult) -> AcceptResult:
        """Keep the accepted path's KV, agree across ranks and publish the new lengths."""


@dataclass(frozen=True)
class RoundOutcome:
    """What a round leaves to its caller."""

    tree: DraftTree
    accepted: AcceptResult
    record: RoundRecord


@dataclass(frozen=True)
class _Emitted:
    """Tokens that the drafter has not seen yet, still on the device."""

    slots: tuple[int, ...]
    emitted: Int[Tensor, "B K"]
    accept_lens: Int[Tensor, " B"]


@dataclass(frozen=True)
class _HostShape:
    """Facts of a round's trees that the host keeps for its record."""

    num_drafting: int
    nodes_per_depth: tuple[int, ...]


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

    def begin(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Start a request in `slot`; `output` is what it emitted before a retraction."""
        self._catch_up()
        self._outputs[slot] = list(output)
        self._drafter.begin(slot, [*prompt, *output])

    def emitted(self, slots: Sequence[int], tokens: Tensor, accept_lens: Tensor) -> None:
        """Queue emitted tokens ([B, K], [B]). Host sync: once in MAX_PENDING rounds."""
        if len(self._pending) == MAX_PENDING:  # nothing was proposed for long
            self._catch_up()
        self._pending.append(_Emitted(tuple(slots), tokens, accept_lens))

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
        proposal = self._propose(slots, speculate, budget.draft_budget)
        proposed = time.perf_counter()
        tree, shape = self._build(proposal, bonus_tokens, budget)
        built = time.perf_counter()
        logits = target.verify(tree)
        verified = time.perf_counter()
        max_depth = min(tree.num_draft_tokens - 1, self._tree_builder.depth)
        accepted = self.accept(tree, logits, target.sampling(max_depth + 1))
        accepted = target.commit(tree, accepted)
        self.emitted(slots, accepted.emitted, accepted.accept_lens)
        finished = time.perf_counter()
        record = RoundRecord(
            num_requests=len(slots),
            num_opted_out=len(slots) - sum(speculate),
            draft_budget=budget.draft_budget,
            reason=budget.reason,
            num_draft_tokens=tree.num_draft_tokens,
            num_drafting=shape.num_drafting,
            nodes_per_depth=shape.nodes_per_depth,
            draft_seconds=proposed - started,
            build_seconds=built - proposed,
            verify_seconds=verified - built,
            accept_seconds=finished - verified,
        )
        return RoundOutcome(tree, accepted, record)

    def _propose(
        self, slots: Sequence[int], speculate: Sequence[bool], draft_budget: int
    ) -> DraftProposal:
        if draft_budget == 0 or not any(speculate):
            return _no_candidates(len(slots))
        self._catch_up()
        active = [slot for slot, wanted in zip(slots, speculate, strict=True) if wanted]
        proposal = self._drafter.propose(active, draft_budget)
        return proposal if len(active) == len(slots) else _spread(proposal, speculate)

    def _build(
        self, proposal: DraftProposal, bonus_tokens: Int[Tensor, " B"], budget: Budget
    ) -> tuple[DraftTree, _HostShape]:
        """Build the trees where the candidates are, in the narrowest verify width that fits."""
        assert budget.draft_budget + 1 in self._verify_widths, (
            "a budget that the plan does not know"
        )
        allowed = min(budget.draft_budget, proposal.tokens.shape[1])
        tree = self._tree_builder.build(
            proposal,
            bonus_tokens.to(proposal.tokens.device),
            self._width(1 + allowed) - 1,
            budget.min_survival,
        )
        tree = tree.narrow(self._width(int(tree.num_nodes.max())))
        return tree.to(bonus_tokens.device), _host_shape(tree)

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
                self._drafter.observe(slot, tokens)
        self._pending.clear()


def _host_shape(tree: DraftTree) -> _HostShape:
    live = torch.arange(tree.num_draft_tokens, device=tree.tokens.device) < tree.num_nodes[:, None]
    return _HostShape(
        num_drafting=int((tree.num_nodes > 1).sum()),
        nodes_per_depth=tuple(torch.bincount(tree.depth[live]).tolist()[1:]),
    )


def _no_candidates(batch: int) -> DraftProposal:
    """A proposal without candidates (M = 0)."""
    return DraftProposal(
        tokens=torch.zeros((batch, 0), dtype=torch.int64),
        parent_index=torch.zeros((batch, 0), dtype=torch.int64),
        log_q=torch.zeros((batch, 0)),
    )


def _spread(proposal: DraftProposal, speculate: Sequence[bool]) -> DraftProposal:
    """Give every request that opted out a row without candidates."""
    rows = torch.tensor(
        [i for i, wanted in enumerate(speculate) if wanted], device=proposal.tokens.device
    )
    batch, width = len(speculate), proposal.tokens.shape[1]
    tokens = proposal.tokens.new_zeros((batch, width))
    parents = proposal.parent_index.new_full((batch, width), -1)
    log_q = proposal.log_q.new_full((batch, width), float("-inf"))
    tokens[rows], parents[rows] = proposal.tokens, proposal.parent_index
    log_q[rows] = proposal.log_q
    return DraftProposal(tokens, parents, log_q)
