"""One round: who is called when, and that rounds emit what plain decoding emits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import specstack.outcome
from specstack.budget.base import Budget
from specstack.budget.survival import SurvivalWindow
from specstack.drafters.base import FeatureNeeds, TokenDrafter
from specstack.drafters.ngram import NgramDrafter
from specstack.metrics.record import RoundRecord
from specstack.models.heads.features import TargetFeatures
from specstack.plan import verify_widths
from specstack.round import MAX_PENDING, Speculator
from specstack.trees.base import TreeBuilder
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.types import (
    AcceptResult,
    CommittedTokens,
    DraftBatch,
    DraftProposal,
    DraftTree,
    NodeLogits,
    SamplingTensors,
)
from specstack.verify.greedy import GreedyRule

VOCAB = 7


def toy_next(tokens: Sequence[int]) -> int:
    """A deterministic language with repetitions, so that drafts are often right."""
    return (tokens[-1] * 3 + tokens[-2] + (len(tokens) % 5 == 0)) % VOCAB


def one_hot(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()


def plain(prompt: Sequence[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(toy_next(tokens))
    return tokens[len(prompt) :]


@dataclass
class ToyTarget:
    """Greedy logits of `toy_next`; `texts` are the committed tokens per slot, root excluded."""

    texts: dict[int, list[int]]
    slots: Sequence[int]
    calls: list[str] = field(default_factory=list)
    tree: DraftTree | None = None
    num_positions: int = 0

    def draft_batch(self) -> DraftBatch:
        """As many tokens as there are; the bonus tokens are not this target's business."""
        seq_lens = torch.tensor([len(self.texts[slot]) for slot in self.slots])
        none = torch.zeros(len(self.slots), 0, dtype=torch.int64)
        return DraftBatch(tuple(self.slots), torch.zeros_like(seq_lens), seq_lens, none)

    def verify(self, tree: DraftTree) -> NodeLogits:
        """Computes live nodes alone, as the contract allows."""
        self.calls.append("verify")
        self.tree = tree
        values: list[Tensor] = []
        rows = torch.zeros_like(tree.tokens)
        for b, slot in enumerate(self.slots):
            rows[b] = len(values)
            for node in range(int(tree.num_nodes[b])):
                seen = tree.tree_mask[b, node].nonzero().flatten()
                order = sorted(seen.tolist(), key=lambda n: int(tree.depth[b, n]))
                path = [int(tree.tokens[b, n]) for n in order]
                rows[b, node] = len(values)
                values.append(one_hot(toy_next([*self.texts[slot], *path])))
        return NodeLogits(torch.stack(values), rows)

    def sampling(self, num_positions: int) -> SamplingTensors:
        self.calls.append("sampling")
        self.num_positions = num_positions
        ones = torch.ones(len(self.slots))
        return SamplingTensors(
            ones, ones.long(), ones, ones * 0, torch.zeros(len(ones), num_positions), True
        )

    def commit(self, tree: DraftTree, accepted: AcceptResult) -> AcceptResult:
        self.calls.append("commit")
        for b, slot in enumerate(self.slots):
            path = [n for n in accepted.accept_index[b].tolist() if n >= 0]
            self.texts[slot] += tree.tokens[b, path].tolist()
        return accepted

    def committed(self, tree: DraftTree, accepted: AcceptResult) -> CommittedTokens | None:
        self.calls.append("committed")
        nothing = torch.zeros(0, dtype=torch.int64)
        return CommittedTokens(
            TargetFeatures(), nothing, nothing, nothing, nothing, self.draft_batch(), 0
        )


@dataclass
class ScriptedDrafter(TokenDrafter):
    """Proposes one chain of fixed tokens per slot and records what it is told."""

    calls: list[object]
    length: int = 3

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        self.calls.append(("begin", slot, list(tokens)))

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        self.calls.append(("observe", slot, list(tokens)))

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        self.calls.append(("propose", list(batch.slots), draft_budget))
        shape = (len(batch.slots), self.length)
        return DraftProposal(
            torch.arange(self.length).expand(shape),
            torch.arange(-1, self.length - 1).expand(shape),
            torch.full(shape, -0.1),
        )


def speculator(calls: list[object], length: int = 3, budgets: Sequence[int] = (4,)) -> Speculator:
    drafter = ScriptedDrafter(calls, length)
    return Speculator(drafter, ChainBuilder(8), GreedyRule(), verify_widths(budgets))


def one_round(
    spec: Speculator, slots: Sequence[int], budget: int, speculate: Sequence[bool] | None = None
) -> tuple[ToyTarget, DraftTree]:
    target = ToyTarget({slot: [1, 2] for slot in slots}, slots)
    outcome = spec.round(
        slots, torch.tensor([3] * len(slots)), speculate or [True] * len(slots),
        Budget(budget, "test"), target,
    )  # fmt: skip
    return target, outcome.tree


def test_what_was_emitted_reaches_the_drafter_before_it_proposes_again() -> None:
    calls: list[object] = []
    spec = speculator(calls)
    spec.begin(0, [1, 2], [])
    spec.emitted([0], torch.tensor([[3, 9, 9]]), torch.tensor([1]))
    target, _ = one_round(spec, [0], 4)
    assert calls == [("begin", 0, [1, 2]), ("observe", 0, [3]), ("propose", [0], 4)]
    assert target.calls == ["verify", "sampling", "commit"]


@pytest.mark.parametrize("speculate", [[True, True], [False, False]])
def test_budget_zero_and_general_opt_out_never_ask_the_drafter(speculate: list[bool]) -> None:
    calls: list[object] = []
    spec = speculator(calls)
    for slot in (0, 1):
        spec.begin(slot, [1, 2], [])
    budget = 0 if all(speculate) else 4
    _, tree = one_round(spec, [0, 1], budget, speculate)
    assert tree.num_draft_tokens == 1
    assert not any(call[0] == "propose" for call in calls)  # type: ignore[index]


def test_requests_that_opted_out_get_a_root_alone() -> None:
    calls: list[object] = []
    spec = speculator(calls)
    for slot in (4, 5, 6):
        spec.begin(slot, [1, 2], [])
    _, tree = one_round(spec, [4, 5, 6], 4, [True, False, True])
    assert ("propose", [4, 6], 4) in calls
    assert tree.num_nodes.tolist() == [4, 1, 4]
    assert tree.retrieve_next_token[1].tolist() == [-1] * 4
    assert spec.output_tokens(5) == [toy_next([1, 2, 3])]


def test_the_record_counts_live_drafts_per_depth() -> None:
    spec = speculator([], length=2)
    for slot in (0, 1):
        spec.begin(slot, [1, 2], [])
    target = ToyTarget({0: [1, 2], 1: [1, 2]}, [0, 1])
    roots = torch.tensor([3, 3])
    record = spec.round([0, 1], roots, [True, False], Budget(4, "why"), target).record()
    assert (record.num_requests, record.num_opted_out, record.num_drafting) == (2, 1, 1)
    assert (record.draft_budget, record.reason) == (4, "why")
    assert record.nodes_per_depth == (1, 1)
    assert record.num_draft_tokens == 4


@pytest.mark.parametrize("length", range(8))
@pytest.mark.parametrize("budget", [0, 3, 4, 9])
def test_only_widths_of_the_plan_are_verified(length: int, budget: int) -> None:
    widths = verify_widths((3, 4, 9))
    spec = speculator([], length, (3, 4, 9))
    spec.begin(0, [1, 2], [])
    target, tree = one_round(spec, [0], budget)
    drafts = min(length, budget)
    assert tree.num_nodes.tolist() == [1 + drafts]
    assert tree.num_draft_tokens == min(w for w in widths if w > drafts)
    assert target.num_positions == tree.num_draft_tokens


def test_drafts_below_the_price_of_a_node_are_not_verified() -> None:
    spec = speculator([], length=4)
    spec.begin(0, [1, 2], [])
    target = ToyTarget({0: [1, 2]}, [0])
    price = Budget(4, "test", min_survival=0.8)  # exp(-0.1) and exp(-0.2) are above
    tree = spec.round([0], torch.tensor([3]), [True], price, target).tree
    assert tree.num_nodes.tolist() == [3]
    assert tree.num_draft_tokens == 4, "the next width of the plan"


def test_a_budget_outside_the_plan_is_our_own_bug() -> None:
    spec = speculator([])
    spec.begin(0, [1, 2], [])
    with pytest.raises(AssertionError, match="does not know"):
        one_round(spec, [0], 5)


def test_a_reused_slot_starts_clean() -> None:
    """The old request's last tokens are handed over first and do not leak into the new one."""
    calls: list[object] = []
    spec = speculator(calls)
    spec.begin(3, [1, 2], [])
    spec.emitted([3], torch.tensor([[5, 6]]), torch.tensor([2]))
    spec.begin(3, [4, 4], [7])
    assert calls == [("begin", 3, [1, 2]), ("observe", 3, [5, 6]), ("begin", 3, [4, 4, 7])]
    assert spec.output_tokens(3) == [7]
    spec.emitted([3], torch.tensor([[8]]), torch.tensor([1]))
    assert spec.output_tokens(3) == [7, 8]
    assert calls[-1] == ("observe", 3, [8])


@dataclass
class WildDrafter(TokenDrafter):
    """Random tries, right and wrong: rounds must be exact whatever is drafted."""

    seed: int
    history: dict[int, list[int]] = field(default_factory=dict)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        self.history[slot] = list(tokens)

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        self.history[slot] += tokens

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        self.seed += 1
        rng = torch.Generator().manual_seed(self.seed)
        tokens, parents, log_q = [], [], []
        for slot in batch.slots:
            used: dict[int, set[int]] = {}
            row: list[list[int]] = []
            for m in range(draft_budget):
                parent = int(torch.randint(-1, m, (1,), generator=rng)) if m else -1
                path = row[parent] if parent >= 0 else []
                token = toy_next([*self.history[slot], *path])
                taken = used.setdefault(parent, set())
                token = next((t for t in (token, *range(VOCAB)) if t not in taken), -1)
                if token < 0:
                    break
                taken.add(token)
                row.append([*path, token])
                parents.append(parent)
            dead = draft_budget - len(row)
            tokens.append([path[-1] for path in row] + [0] * dead)
            parents += [-1] * dead
            log_q.append([-0.3] * len(row) + [float("-inf")] * dead)
        shape = (len(batch.slots), draft_budget)
        return DraftProposal(
            torch.tensor(tokens).reshape(shape), torch.tensor(parents).reshape(shape),
            torch.tensor(log_q).reshape(shape),
        )  # fmt: skip


def decode(spec: Speculator, prompts: list[list[int]], budgets: Sequence[int]) -> list[list[int]]:
    """Prefill, then one round per budget; request 1 (if any) opts out of drafts."""
    slots = [10 + i for i in range(len(prompts))]
    committed = {slot: list(prompt) for slot, prompt in zip(slots, prompts, strict=True)}
    roots = torch.tensor([toy_next(prompt) for prompt in prompts])
    for slot, prompt in zip(slots, prompts, strict=True):
        spec.begin(slot, prompt, [])
    spec.emitted(slots, roots[:, None], torch.ones_like(roots))
    speculate = [i != 1 for i in range(len(prompts))]
    for budget in budgets:
        target = ToyTarget(committed, slots)
        outcome = spec.round(slots, roots, speculate, Budget(budget, "test"), target)
        roots = outcome.accepted.bonus_tokens
    for slot, root in zip(slots, roots.tolist(), strict=True):
        assert [*committed[slot], root] == [*prompts[slot - 10], *spec.output_tokens(slot)]
    return [spec.output_tokens(slot) for slot in slots]


PROMPTS = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12), min_size=1, max_size=3
)
BUDGETS = st.lists(st.sampled_from([0, 1, 3, 6]), min_size=1, max_size=8)
BUILDERS = st.sampled_from([ChainBuilder(1), ChainBuilder(4), BestFirstBuilder(1),
                            BestFirstBuilder(4), BestFirstBuilder(6, width=2)])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(PROMPTS, BUDGETS, BUILDERS, st.one_of(st.none(), st.integers(0, 1000)))
def test_rounds_emit_what_plain_decoding_emits(
    prompts: list[list[int]], budgets: list[int], builder: TreeBuilder, seed: int | None
) -> None:
    drafter = NgramDrafter(builder.depth) if seed is None else WildDrafter(seed)
    spec = Speculator(drafter, builder, GreedyRule(), verify_widths((0, 1, 3, 6)))
    for prompt, output in zip(prompts, decode(spec, prompts, budgets), strict=True):
        assert len(output) >= len(budgets) + 1
        assert output == plain(prompt, len(output))


def test_right_drafts_are_accepted_several_at_once() -> None:
    """Control: the property above is not that of rounds that accept nothing."""
    spec = Speculator(NgramDrafter(6), BestFirstBuilder(6), GreedyRule(), verify_widths((6,)))
    prompt = plain([1, 2], 120)
    [output] = decode(spec, [prompt], [6] * 8)
    assert len(output) > 2 * 9


def test_tokens_do_not_pile_up_while_nothing_is_proposed() -> None:
    calls: list[object] = []
    spec = speculator(calls, budgets=(0,))
    spec.begin(0, [1, 2], [])
    for _ in range(MAX_PENDING + 1):
        one_round(spec, [0], 0)
    observed = [call for call in calls if isinstance(call, tuple) and call[0] == "observe"]
    assert len(observed) == MAX_PENDING
    assert not any(isinstance(call, tuple) and call[0] == "propose" for call in calls)


@dataclass
class FeatureOnlyDrafter(ScriptedDrafter):
    """Reads features alone."""

    needs_tokens = False
    needs = FeatureNeeds((1,), ())

    def absorb(self, committed: CommittedTokens) -> None:
        self.calls.append(("absorb", committed.batch.seq_lens.tolist()))


def feature_rounds(calls: list[object], *budgets: int) -> None:
    """Rounds of one request whose drafter reads features."""
    spec = Speculator(FeatureOnlyDrafter(calls), ChainBuilder(8), GreedyRule(), verify_widths((4,)))
    assert spec.needs == FeatureNeeds((1,), ())
    spec.begin(0, [1, 2], [])
    for budget in budgets:
        target = ToyTarget({0: [1, 2]}, [0])
        spec.round([0], torch.tensor([3]), [True], Budget(budget, "test"), target)
        assert target.calls == ["verify", "sampling", "commit", "committed"]


def test_features_are_absorbed_after_every_round_that_drafts() -> None:
    calls: list[object] = []
    feature_rounds(calls, 4, 4)
    assert calls == [("propose", [0], 4), ("absorb", [3])] * 2


def test_plain_rounds_leave_the_drafter_alone_until_it_drafts_again() -> None:
    """No work while off, and nothing is missing when drafts resume."""
    calls: list[object] = []
    feature_rounds(calls, 0, 0)
    assert calls == []
    feature_rounds(calls, 0, 0, 4)
    assert calls == [("absorb", [3]), ("propose", [0], 4), ("absorb", [3])], "two rounds as one"


def test_requests_with_a_budget_of_their_own() -> None:
    """0 is as good as an opt-out, which it is not counted as; fewer drafts are the first ones."""
    calls: list[object] = []
    spec = speculator(calls)
    for slot in (4, 5, 6):
        spec.begin(slot, [1, 2], [])
    target = ToyTarget({slot: [1, 2] for slot in (4, 5, 6)}, [4, 5, 6])
    budget = Budget(4, "test", request_budgets=(3, 0, 1))
    outcome = spec.round([4, 5, 6], torch.tensor([3, 3, 3]), [True] * 3, budget, target)
    assert ("propose", [4, 6], 4) in calls
    assert outcome.tree.num_nodes.tolist() == [4, 1, 2]
    assert outcome.record().num_drafts == (3, 0, 1)
    assert (outcome.record().num_opted_out, outcome.record().num_gated) == (0, 1)
    assert (outcome.record().survivals[:, :3] > 0).tolist() == [[True] * 3, [False] * 3, [True] * 3]


def ranked_record(min_survival: float) -> RoundRecord:
    spec = Speculator(ScriptedDrafter([], 3), ChainBuilder(8), GreedyRule(), verify_widths((4,)))
    spec.begin(7, [1, 2], [])
    target, budget = ToyTarget({7: [1, 2]}, [7]), Budget(4, "test", min_survival)
    return spec.round([7], torch.tensor([4]), [True], budget, target).record()


def test_the_record_ranks_what_was_offered_and_accepted() -> None:
    record = ranked_record(0.0)
    survivals = record.survivals[0]
    assert survivals[:3].tolist() == pytest.approx([math.exp(-0.1 * d) for d in (1, 2, 3)])
    assert not survivals[3:].any(), "three drafts were offered"
    assert record.num_drafts == (3,)
    assert record.num_correct == (1,)
    assert record.accept_ranks[0].tolist() == [1, 0, 0]
    priced = ranked_record(0.85)
    assert priced.survivals[0].tolist() == survivals.tolist(), "offered, if not verified"
    assert priced.num_drafts == (1,)
    assert priced.min_survival == 0.85


def test_a_drafter_of_features_never_waits_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host copies are not read between rounds."""
    spec = Speculator(FeatureOnlyDrafter([]), ChainBuilder(8), GreedyRule(), verify_widths((4,)))
    spec.begin(0, [1, 2], [])
    target = ToyTarget({0: [1, 2]}, [0])

    def read(copy: object) -> None:
        raise AssertionError("the host waited")

    with monkeypatch.context() as patched:
        patched.setattr(specstack.outcome.HostCopy, "numpy", read)
        for _ in range(3):
            spec.round([0], torch.tensor([3]), [True], Budget(4, "test"), target)
    assert len(spec.output_tokens(0)) >= 3


class TwoDrafters(ScriptedDrafter):
    """As a merge: the first two drafts of a chain are drafter 0's, the last two drafter 2's."""

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        proposal = super().propose(batch, draft_budget)
        sources = torch.tensor([0b001, 0b101, 0b100]).expand_as(proposal.tokens)
        return replace(proposal, sources=sources)


def test_drafts_are_counted_for_every_drafter_of_a_merge() -> None:
    drafter = TwoDrafters([], 3)
    spec = Speculator(drafter, ChainBuilder(8), GreedyRule(), verify_widths((4,)))
    target = ToyTarget({7: [1, 2], 9: [1, 2]}, [7, 9])
    for slot in (7, 9):
        spec.begin(slot, [1, 2], [])
    outcome = spec.round([7, 9], torch.tensor([4, 4]), [True, False], Budget(4, "t"), target)
    assert outcome.accepted.num_correct_drafts.tolist() == [1, 0]
    assert outcome.record().drafts_per_drafter[:3] == (2, 0, 2)
    assert outcome.record().correct_per_drafter[:3] == (1, 0, 0)


def test_a_single_drafter_is_not_counted_twice() -> None:
    calls: list[object] = []
    spec = speculator(calls)
    spec.begin(7, [1, 2], [])
    target = ToyTarget({7: [1, 2]}, [7])
    record = spec.round([7], torch.tensor([3]), [True], Budget(4, "t"), target).record()
    assert record.drafts_per_drafter == record.correct_per_drafter == ()


def test_a_request_that_had_ended_costs_time_and_counts_nowhere() -> None:
    spec = Speculator(TwoDrafters([], 3), ChainBuilder(8), GreedyRule(), verify_widths((4,)))
    target = ToyTarget({7: [1, 2], 9: [1, 2]}, [7, 9])
    for slot in (7, 9):
        spec.begin(slot, [1, 2], [])
    outcome = spec.round([7, 9], torch.tensor([4, 4]), [True] * 2, Budget(4, "t"), target)
    both, one = outcome.record(), outcome.record([False, True])
    assert both.ended == ()
    assert both.num_emitted == 2 * one.num_emitted == 4
    assert (both.num_drafting, one.num_drafting) == (2, 1)
    assert (both.num_asked, one.num_asked) == (2, 1)
    assert both.nodes_per_depth == tuple(2 * n for n in one.nodes_per_depth)
    assert both.correct_per_drafter == tuple(2 * n for n in one.correct_per_drafter)
    assert one.num_drafts == both.num_drafts == (3, 3), "they were computed"
    assert one.counted_drafts == (3, 0)
    assert one.num_correct == (1, 0)
    assert not one.survivals[1].any()
    assert not one.accept_ranks[1].any()


def test_an_ended_request_is_not_counted_among_those_that_did_not_draft_either() -> None:
    """It opted out, or was given no budget, and ended: it is left out once."""
    spec = Speculator(ScriptedDrafter([], 3), ChainBuilder(8), GreedyRule(), verify_widths((4,)))
    slots = [4, 5, 6, 7]
    for slot in slots:
        spec.begin(slot, [1, 2], [])
    target = ToyTarget({slot: [1, 2] for slot in slots}, slots)
    budget = Budget(4, "test", request_budgets=(3, 3, 0, 3))
    wanted = [True, False, True, True]
    outcome = spec.round(slots, torch.tensor([3] * 4), wanted, budget, target)
    for ended in ([False] * 4, [False, True, True, False], [True] * 4, [False] * 3 + [True]):
        record = outcome.record(ended)
        assert record.num_opted_out == (not ended[1])
        assert record.num_gated == (not ended[2])
        assert record.num_asked == 2 - ended[0] - ended[3] == record.num_drafting
        window = SurvivalWindow((0, 4))
        window.observe(record)
        assert window.num_observed == record.num_asked
