"""Replayed rounds: what they show is what was drafted, and what the target itself would show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specstack.budget.base import Budget
from specstack.drafters.base import Drafter, TokenDrafter
from specstack.drafters.merge import MergeDrafter
from specstack.drafters.ngram import NgramDrafter
from specstack.evaluation.configurations import grid
from specstack.evaluation.evaluate import Evaluator, Settings, decode
from specstack.evaluation.known_texts import KnownText
from specstack.evaluation.live import Sampling
from specstack.evaluation.measures import accept_length_of, measure
from specstack.evaluation.replay import ReplayTarget
from specstack.evaluation.rounds import Notes, run_batch
from specstack.evaluation.running import KvTable
from specstack.evaluation.tallies import count
from specstack.models.heads.checkpoint import make_head, save_head
from specstack.models.heads.config import HeadConfig
from specstack.models.heads.testing import randomise
from specstack.plan import verify_widths
from specstack.round import Speculator
from specstack.training.run_config import Target
from specstack.training.target_model import FrozenTarget, read_shape
from specstack.training.tiny import CONTEXTS, save_target
from specstack.trees.base import TreeBuilder
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.types import DraftBatch, DraftProposal
from specstack.verify.greedy import GreedyRule
from specstack.verify.sample_and_walk import SampleAndWalkRule

CPU = torch.device("cpu")
DEPTH = 4


@dataclass
class ScriptedDrafter(TokenDrafter):
    """One chain per request: of depth k right with probability `alphas[k]`, else wrong."""

    texts: Sequence[KnownText]
    alphas: Sequence[float]
    seed: int = 0
    seen: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        self.seen[slot] = list(tokens)

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        self.seen[slot] += tokens

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        rows = []
        for slot, length, bonus in zip(
            batch.slots, batch.seq_lens.tolist(), batch.bonus_tokens.tolist(), strict=True
        ):
            text = self.texts[slot].tokens
            assert self.seen[slot] == list(text[: length + 1])
            assert bonus == text[length]
            ahead = [*text[length + 1 :], *[0] * DEPTH][:DEPTH]
            is_right = self.random.random(DEPTH) < self.alphas
            rows.append([t if ok else t + 1 for t, ok in zip(ahead, is_right, strict=True)])
        shape = (len(rows), DEPTH)
        log_q = torch.log(torch.tensor(self.alphas).clamp(min=1e-6))
        return DraftProposal(
            torch.tensor(rows), torch.arange(-1, DEPTH - 1).expand(shape), log_q.expand(shape)
        )


def texts_of(num: int, length: int, vocab_size: int = 50) -> list[KnownText]:
    random = np.random.default_rng(3)
    return [
        KnownText("a", tuple(random.integers(0, vocab_size, 3 + i % 4).tolist()),
                  tuple(random.integers(0, vocab_size, length + i).tolist()))
        for i in range(num)
    ]  # fmt: skip


def run(drafter: Drafter, texts: list[KnownText], builder: TreeBuilder, budget: int) -> Notes:
    spec = Speculator(drafter, builder, GreedyRule(), verify_widths((budget,)))
    notes = Notes(len(texts))
    table = KvTable(len(texts), max(len(text.tokens) for text in texts), CPU)
    batch = ReplayTarget(texts, table, None, CPU)
    sequences = np.arange(len(texts))
    run_batch(spec, Budget(budget, "t"), batch, [t.prompt for t in texts], sequences, notes)
    for slot, text in enumerate(texts):
        assert tuple(spec.output_tokens(slot)) == text.output, "a replay emits the text"
    return notes


@pytest.mark.parametrize("builder", [ChainBuilder(DEPTH), BestFirstBuilder(DEPTH)])
def test_an_oracle_gets_the_maximum(builder: TreeBuilder) -> None:
    texts = texts_of(3, 31)
    notes = run(ScriptedDrafter(texts, [1.0] * DEPTH), texts, builder, DEPTH)
    found = measure(count(notes.rounds, 3, DEPTH), num_draws=100, seed=0)
    assert found.accept_length.value == 1 + DEPTH
    assert found.alphas[-1].value == found.retention.value == 1
    assert all(e.low == e.high == 1 for e in found.alphas)


def test_wrong_tokens_get_exactly_one() -> None:
    texts = texts_of(3, 31)
    notes = run(ScriptedDrafter(texts, [0.0] * DEPTH), texts, ChainBuilder(DEPTH), DEPTH)
    found = measure(count(notes.rounds, 3, DEPTH), num_draws=100, seed=0)
    assert found.accept_length.value == found.as_served.value == 1
    assert found.accept_rate.value == 0
    assert found.num_rounds == sum(len(text.output) - 1 for text in texts)


def test_of_chains_the_accept_length_is_one_plus_the_products_of_alphas() -> None:
    """Against the plain mean of emitted tokens over rounds that no end can cut."""
    texts = texts_of(6, 300)
    notes = run(ScriptedDrafter(texts, [0.8, 0.7, 0.6, 0.9]), texts, ChainBuilder(DEPTH), DEPTH)
    rounds = notes.rounds
    ends = np.array([len(text.tokens) for text in texts])
    rounds = rounds.where(rounds.context_len + DEPTH + 1 < ends[rounds.sequence])
    assert not rounds.is_cut.any()
    counts = count(rounds, 6, DEPTH).total
    assert float(accept_length_of(counts)) == pytest.approx(rounds.num_emitted.mean(), abs=1e-12)
    alphas = (counts.right / counts.reached).tolist()
    assert alphas == pytest.approx([0.8, 0.7, 0.6, 0.9], abs=0.06)


def test_ends_of_texts_do_not_lower_the_accept_length() -> None:
    """Answers of eight tokens: nearly every round could be cut, and what is served is less."""
    texts = texts_of(400, 6)
    alphas = [0.9] * DEPTH
    notes = run(ScriptedDrafter(texts[:40], alphas), texts[:40], ChainBuilder(DEPTH), DEPTH)
    assert notes.rounds.is_cut.any()
    texts = [KnownText("a", t.prompt, t.output[:8]) for t in texts_of(400, 8)]
    notes = run(ScriptedDrafter(texts, alphas, 1), texts, ChainBuilder(DEPTH), DEPTH)
    found = measure(count(notes.rounds, 400, DEPTH), num_draws=100, seed=0)
    expected = 1 + sum(0.9**k for k in range(1, DEPTH + 1))
    assert found.accept_length.value == pytest.approx(expected, abs=0.12)
    assert found.as_served.value < expected - 0.3


def test_drafts_are_counted_by_their_probability() -> None:
    texts = texts_of(6, 300)
    notes = run(ScriptedDrafter(texts, [0.8, 0.7, 0.6, 0.9]), texts, ChainBuilder(DEPTH), DEPTH)
    drafts, sum_q, right = (
        x.sum(0) for x in (notes.reliability.drafts, notes.reliability.sum_q,
                           notes.reliability.right)
    )  # fmt: skip
    used = drafts > 0
    assert right[used] / drafts[used] == pytest.approx(sum_q[used] / drafts[used], abs=0.05)
    assert right.sum() == notes.rounds.num_right.sum()
    rounds = notes.rounds
    assert (
        drafts.sum()
        == rounds.num_drafts.sum() - ((rounds.num_drafts - rounds.num_right) * rounds.is_cut).sum()
    ), "drafts beyond the end are neither right nor wrong"


def test_a_larger_budget_is_never_worse_for_best_first_trees() -> None:
    """A text of few tokens, so that n-grams branch. In expectation; on these data."""
    texts = texts_of(8, 300, vocab_size=4)
    lengths = [
        float(accept_length_of(count(run(NgramDrafter(DEPTH), texts, BestFirstBuilder(DEPTH), b)
                                     .rounds, 8, min(b, DEPTH)).total))
        for b in (1, 2, 4, 8, 16)
    ]  # fmt: skip
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0] + 0.5


def merged(texts: list[KnownText], *alphas: list[float]) -> MergeDrafter:
    return MergeDrafter([ScriptedDrafter(texts, each) for each in alphas], DEPTH)


ORACLE, HALF, WRONG = [1.0] * DEPTH, [1.0, 1.0, 0.0, 0.0], [0.0] * DEPTH


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_drafts_of_a_merge_are_counted_for_every_drafter_that_proposed_them(
    order: tuple[int, ...],
) -> None:
    """Six rounds of five tokens per text: the first two drafts of a path are two drafters'."""
    texts = [text.cut(31) for text in texts_of(3, 31)]
    drafters = [(ORACLE, 4, 4), (HALF, 4, 2), (WRONG, 4, 0)]
    expected = [drafters[i] for i in order]
    drafter = merged(texts, *(alphas for alphas, *_ in expected))
    rounds = run(drafter, texts, BestFirstBuilder(DEPTH), 3 * DEPTH).rounds
    assert len(rounds) == 3 * 6
    assert set(rounds.num_drafts.tolist()) == {10}, "two of the twelve are proposed twice"
    for name, column in (("drafts_per_drafter", 1), ("right_per_drafter", 2)):
        found = getattr(rounds, name)
        assert (found[:, :3] == [row[column] for row in expected]).all()
        assert (found[:, 3:] == 0).all()


def test_ends_of_texts_count_for_the_drafters_as_they_do_for_the_merge() -> None:
    texts = texts_of(5, 8)
    rounds = run(merged(texts, WRONG, ORACLE), texts, BestFirstBuilder(DEPTH), 2 * DEPTH).rounds
    assert rounds.is_cut.any()
    assert (rounds.right_per_drafter[:, 1] == rounds.num_right).all()
    assert (rounds.right_per_drafter[:, 0] == 0).all()
    assert (rounds.drafts_per_drafter.sum(1) == rounds.num_drafts).all(), "none proposed twice"


def test_without_a_merge_nothing_is_counted_per_drafter() -> None:
    texts = texts_of(3, 31)
    rounds = run(ScriptedDrafter(texts, ORACLE), texts, ChainBuilder(DEPTH), DEPTH).rounds
    assert rounds.num_right.any()
    assert not rounds.drafts_per_drafter.any()
    assert not rounds.right_per_drafter.any()


HEADS = {
    "block hidden": ("block", "hidden"),
    "block sum": ("block", "sum"),
    "autoregressive hidden": ("autoregressive", "hidden"),
    "autoregressive kv": ("autoregressive", "kv_linear"),
    "autoregressive gated": ("autoregressive", "gated"),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> FrozenTarget:
    options = Target.model_validate({"model": str(target_folder), "dtype": "float32"})
    return FrozenTarget(str(target_folder), options, CPU)


def pipeline(target: Path, drafter: dict[str, object], file: Path, **sections: object) -> Path:
    text = {
        "version": 1, "target": str(target), "drafter": drafter,
        "tree": {"kind": "best_first", "depth": 3}, "verify": "sample_and_walk",
        "budget": {"kind": "fixed", "draft_budget": 6}, "engine": {"device": "cpu"}, **sections,
    }  # fmt: skip
    file.write_text(json.dumps(text))
    return file


def save_tiny_head(folder: Path, case: str, target: FrozenTarget) -> Path:
    form, name = HEADS[case]
    torch.manual_seed(0)
    tapped = {"target_layers": [0, 2]}  # SGLang does not hand out the last layer's output
    context = CONTEXTS[name] | (tapped if "target_layers" in CONTEXTS[name] else {})
    shape, _ = read_shape(target.model.name_or_path, "tiny")
    config = HeadConfig.model_validate({
        "form": form, "num_layers": 1, "block_size": 4, "intermediate_size": 32,
        "context": context, "target": shape.model_dump(),
    })  # fmt: skip
    head = make_head(config, target.tables)
    randomise(head.requires_grad_(False), 0.5)
    save_head(head, folder)
    return folder


def head_part(folder: Path, case: str, target: FrozenTarget) -> dict[str, object]:
    return {"kind": HEADS[case][0], "checkpoint": str(save_tiny_head(folder, case, target))}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("case", ["ngram", "merge", *HEADS])
def test_a_replay_shows_what_the_target_itself_shows(
    case: str, temperature: float, target_folder: Path, target: FrozenTarget, tmp_path: Path
) -> None:
    """Round by round and draft by draft; sampled texts too, as their uniforms follow positions."""
    drafter: dict[str, object] = {"kind": "ngram"}
    if case in HEADS:
        drafter = head_part(tmp_path / "head", case, target)
    elif case == "merge":
        head = head_part(tmp_path / "head", "block hidden", target)
        drafter = {"kind": "merge", "of": [head, "ngram"]}
    file = pipeline(target_folder, drafter, tmp_path / "p.yaml")
    configurations = grid(
        file, (), trees=("chain", "best_first"), budgets=(2, 6), min_survival=0.0, load_of_policy=1
    ).configurations
    prompts = [KnownText("a", text.prompt, ()) for text in texts_of(5, 3)]
    sampling = Sampling(temperature, seed=5, max_new_tokens=24)
    rule = SampleAndWalkRule()
    endless = decode(target, prompts, rule, sampling, frozenset(), lambda steps: None)
    ends = frozenset({endless[0].output[12]})
    texts = decode(target, prompts, rule, sampling, ends, lambda steps: None)
    assert len({len(text.output) for text in texts}) > 1, "some answers end early"
    settings = Settings(batch_size=3, device=CPU, check_greedy=temperature == 0)
    kept = [text for text in texts if len(text.output) > 1]
    index = [i for i, text in enumerate(texts) if len(text.output) > 1]
    replayed = Evaluator(configurations, kept, target, settings).run(lambda steps: None)
    live = Evaluator(
        configurations, prompts, target, Settings(3, CPU, live=sampling, end_tokens=ends)
    ).run(lambda steps: None)
    assert live.texts == tuple(texts)
    if temperature == 0:
        assert replayed.check is not None
        assert replayed.check.num_kept == replayed.check.num_tokens > 0
    for configuration, one, other in zip(configurations, replayed.notes, live.notes, strict=True):
        assert rows(one, index) == rows(other, range(len(texts))), configuration.name
        for name in ("drafts", "sum_q", "right"):
            np.testing.assert_allclose(
                getattr(one.reliability, name), getattr(other.reliability, name)[index], atol=1e-3
            )


def rows(notes: Notes, index: Sequence[int]) -> list[tuple[Any, ...]]:
    r = notes.rounds
    columns = (r.context_len, r.num_right, r.is_cut, r.num_drafts, r.num_emitted,
               r.drafts_per_drafter, r.right_per_drafter)  # fmt: skip
    found = zip(
        [index[i] for i in r.sequence.tolist()], *(c.tolist() for c in columns), strict=True
    )
    return sorted(found)
