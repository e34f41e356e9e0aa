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
from typing import Protocol

from jaxtyping import Int
from torch import Tensor

from specstack.budget.base import Budget
from specstack.drafters.backlog import Backlog
from specstack.drafters.base import Drafter, FeatureNeeds
from specstack.outcome import HostCopy, RoundOutcome
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


@dataclass(frozen=True)
class _Emitted:
    """Tokens that the host has not seen yet."""

    slots: tuple[int, ...]
    emitted: HostCopy
    accept_lens: HostCopy


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
        self._backlog = Backlog(drafter)
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

    def forget(self) -> None:
        """Drop what is known of requests that have ended, which all have."""
        self._pending.clear()
        self._outputs.clear()
        self._drafter.forget()

    def absorb(self, committed: CommittedTokens) -> None:
        """Hand over the features of a prefill; `round` does it with its own. Host sync: none."""
        self._backlog.flush()
        self._drafter.absorb(committed)

    def emitted(self, slots: Sequence[int], tokens: Tensor, accept_lens: Tensor) -> None:
        """Queue emitted tokens ([B, K], [B]). Host sync: none on this round or those after it."""
        if len(self._pending) == MAX_PENDING:  # nobody asked for long
            self._catch_up()
        self._pending.append(_Emitted(tuple(slots), HostCopy(tokens), HostCopy(accept_lens)))

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
        wanted, limits = speculate, budget.request_budgets
        if limits is not None:
            speculate = [w and limit > 0 for w, limit in zip(wanted, limits, strict=True)]
        proposal = self._propose(target, speculate, budget.draft_budget)
        proposed = time.perf_counter()
        tree = self._build(proposal, bonus_tokens, budget)
        built = time.perf_counter()
        logits = target.verify(tree)
        verified = time.perf_counter()
        max_depth = min(tree.num_draft_tokens - 1, self._tree_builder.depth)
        accepted = self.accept(tree, logits, target.sampling(max_depth + 1))
        accepted = target.commit(tree, accepted)
        self.emitted(slots, accepted.emitted, accepted.accept_lens)
        finished = time.perf_counter()
        self._absorb(target, tree, accepted, drafted=proposal is not None)
        facts = {
            "num_requests": len(slots),
            "draft_budget": budget.draft_budget,
            "reason": budget.reason,
            "min_survival": budget.min_survival,
            "num_draft_tokens": tree.num_draft_tokens,
            "draft_seconds": proposed - started + time.perf_counter() - finished,
            "build_seconds": built - proposed,
            "verify_seconds": verified - built,
            "accept_seconds": finished - verified,
        }
        return RoundOutcome.of(tree, accepted, facts, wanted, speculate)

    def _propose(
        self, target: Target, speculate: Sequence[bool], draft_budget: int
    ) -> DraftProposal | None:
        if draft_budget == 0 or not any(speculate):
            return None
        self._backlog.flush()
        if self._drafter.needs_tokens:
            self._catch_up()
        batch = target.draft_batch()
        if all(speculate):
            return self._drafter.propose(batch, draft_budget)
        active = batch.select([row for row, wanted in enumerate(speculate) if wanted])
        return _spread(self._drafter.propose(active, draft_budget), speculate)

    def _build(
        self, proposal: DraftProposal | None, bonus_tokens: Int[Tensor, " B"], budget: Budget
    ) -> DraftTree:
        """Build the trees where the candidates are, in the narrowest verify width that fits.

        Host sync: none. How full the trees are is known, and used, on the host alone.
        """
        assert budget.draft_budget + 1 in self._verify_widths, (
            "a budget that the plan does not know"
        )
        if proposal is None:
            return DraftTree.root_only(bonus_tokens)
        allowed = min(budget.draft_budget, proposal.tokens.shape[1])
        device, limits = proposal.tokens.device, budget.request_budgets
        tree = self._tree_builder.build(
            proposal,
            bonus_tokens.to(device),
            self._width(1 + allowed) - 1,
            budget.min_survival,
            None if limits is None else index_on(limits, device),
        )
        if tree.tokens.device.type == "cpu":
            tree = tree.narrow(self._width(int(tree.num_nodes.max())))
        return tree.to(bonus_tokens.device)

    def _absorb(
        self, target: Target, tree: DraftTree, accepted: AcceptResult, *, drafted: bool
    ) -> None:
        """Whatever the budget: a drafter that skips a round would draft from a hole."""
        if self._drafter.needs is None:
            return
        committed = target.committed(tree, accepted)
        if committed is None:
            return
        if drafted:
            self._drafter.absorb(committed)
        else:
            self._backlog.add(committed)

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
