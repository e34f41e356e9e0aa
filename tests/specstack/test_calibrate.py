"""`specstack draft calibrate`: what it counts, the factors it finds, its file, and who reads it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from specstack.bind import bind
from specstack.budget.base import Budget
from specstack.calibration_file import CalibrationFile
from specstack.cli import main
from specstack.drafters.base import TokenDrafter
from specstack.evaluation.calibrate_cli import calibrate
from specstack.evaluation.configurations import grid, uncalibrated
from specstack.evaluation.fit_calibration import PlaceCounts, first_half, fit, held_out
from specstack.evaluation.known_texts import KnownText
from specstack.evaluation.replay import ReplayTarget
from specstack.evaluation.rounds import Notes, run_batch
from specstack.evaluation.running import KvTable
from specstack.evaluation.tallies import Places
from specstack.facts import HostFacts
from specstack.plan import Plan, plan_file, verify_widths
from specstack.round import Speculator
from specstack.training.answers import Answer, to_line
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.calibration import Calibration
from specstack.types import DraftBatch, DraftProposal
from specstack.verify.greedy import GreedyRule
from specstack_dsl import PlanError

CPU = torch.device("cpu")
DEPTH, RANKS = 3, 3

Path_ = tuple[int, ...]
"""Ranks from the root down; the root is ()."""


@dataclass
class PlacedDrafter(TokenDrafter):
    """Full families of RANKS drafts down to DEPTH, and a record of what became of each.

    Child r of a right node is right with probability `right[r]`; it gets a q that is off by the
    factor of its place.
    """

    texts: Sequence[KnownText]
    right: Sequence[float]
    log_factor: np.ndarray
    """[K, R, 2]: log of right over q."""
    record: list[tuple[int, int, dict[Path_, tuple[int, float]]]] = field(default_factory=list)
    """Text, position of the root, and token and log q of every draft."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(7)

    def begin(self, slot: int, tokens: Sequence[int]) -> None: ...

    def observe(self, slot: int, tokens: Sequence[int]) -> None: ...

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        rows = []
        paths = [p for k in range(1, DEPTH + 1) for p in itertools.product(range(RANKS), repeat=k)]
        self.random.shuffle(paths)  # the order in a row says nothing
        paths.sort(key=len)
        for slot, position in zip(batch.slots, batch.seq_lens.tolist(), strict=True):
            drafts = self._drafts(slot, position)
            self.record.append((slot, position, drafts))
            rows.append([drafts[path] for path in paths])
        places = {path: number for number, path in enumerate(paths)}
        parents = torch.tensor([places.get(path[:-1], -1) for path in paths])
        return DraftProposal(
            torch.tensor([[token for token, _ in row] for row in rows]),
            parents.expand(len(rows), -1),
            torch.tensor([[log_q for _, log_q in row] for row in rows], dtype=torch.float32),
        )

    def _drafts(self, slot: int, position: int) -> dict[Path_, tuple[int, float]]:
        ahead = [*self.texts[slot].tokens[position + 1 :], *[0] * DEPTH]
        found = {}
        for depth in range(DEPTH):
            for parent in itertools.product(range(RANKS), repeat=depth):
                chances = [*self.right, 1 - sum(self.right)]
                chosen = self.random.choice(RANKS + 1, p=chances)
                for rank in range(RANKS):
                    token = ahead[depth] if rank == chosen else 1000 + rank  # in no text
                    factor = self.log_factor[depth, rank, int(set(parent) <= {0})]
                    found[*parent, rank] = (token, math.log(self.right[rank]) - factor)
        return found


def texts_of(num: int, length: int) -> list[KnownText]:
    random = np.random.default_rng(3)
    return [
        KnownText("a", tuple(random.integers(0, 50, 3).tolist()),
                  tuple(random.integers(0, 50, length + i % 3).tolist()))
        for i in range(num)
    ]  # fmt: skip


def places_of(drafter: PlacedDrafter, texts: list[KnownText], budget: int) -> Places:
    spec = Speculator(drafter, BestFirstBuilder(DEPTH), GreedyRule(), verify_widths((budget,)))
    notes = Notes(len(texts), keeps_places=True)
    table = KvTable(len(texts), max(len(text.tokens) for text in texts), CPU)
    batch = ReplayTarget(texts, table, None, CPU)
    prompts = [text.prompt for text in texts]
    run_batch(spec, Budget(budget, "t"), batch, prompts, np.arange(len(texts)), notes)
    return notes.places


DEPTH_FACTOR, RANK_FACTOR, SPINE_FACTOR = (1.3, 1.0, 0.75), (1.25, 1.0, 0.8), (0.75, 1.1)
FACTORS = np.log(np.einsum("k,r,s->krs", DEPTH_FACTOR, RANK_FACTOR, SPINE_FACTOR))
"""Of q; a family stays in the order of its ranks."""
RIGHT = (0.5, 0.2, 0.08)
FULL = sum(RANKS**k for k in range(1, DEPTH + 1))


@pytest.mark.parametrize("budget", [1, 4, 15, FULL])
def test_every_draft_that_is_put_to_the_test_is_counted(budget: int) -> None:
    """Against a loop over what the drafter proposed; texts so short that many rounds are cut."""
    texts = texts_of(20, 9)
    drafter = PlacedDrafter(texts, RIGHT, FACTORS)
    found = places_of(drafter, texts, budget)
    expected = []
    for slot, position, drafts in drafter.record:
        text = texts[slot].tokens
        log_qs = {path: sum(drafts[path[:k]][1] for k in range(1, len(path) + 1))
                  for path in drafts}  # fmt: skip
        for path in sorted(log_qs, key=lambda path: -log_qs[path])[:budget]:
            ahead = text[position + 1 :][: len(path)]
            tokens = [drafts[path[:k]][0] for k in range(1, len(path) + 1)]
            if len(ahead) < len(path) or tuple(tokens[:-1]) != ahead[:-1]:
                continue
            spine = set(path[:-1]) <= {0}
            expected.append((slot, len(path), path[-1], spine, round(drafts[path][1], 4),
                             tokens[-1] == ahead[-1]))  # fmt: skip
    columns = (found.sequence, found.depth, found.rank, found.continues_spine,
               found.log_q.astype(float).round(4), found.is_right)  # fmt: skip
    assert Counter(zip(*(column.tolist() for column in columns), strict=True)) == Counter(expected)
    assert {len(row) for row in expected} == {6}, "something was counted"


def farthest(places: Places) -> float:
    """How far the factors are off, in the standard errors of a share's log: sqrt((1 - s) / n s)."""
    counts = PlaceCounts.of(places, DEPTH, RANKS)
    used = counts.reached > 0
    share = np.broadcast_to(np.array(RIGHT)[:, None], used.shape)[used]
    error = np.sqrt((1 - share) / (counts.reached[used] * share))
    return float(np.abs((fit(counts, prior=1e-6) - FACTORS)[used] / error).max())


def test_known_factors_are_found_again() -> None:
    texts = texts_of(120, 80)
    drafter = PlacedDrafter(texts, RIGHT, FACTORS)
    places = places_of(drafter, texts, FULL)
    counts = PlaceCounts.of(places, DEPTH, RANKS)
    assert counts.reached[1:].min() > 500
    assert not counts.reached[0, :, 0].any(), "the root is on the spine"
    assert farthest(places) < 3.5, "of 15 numbers, in standard errors"
    random = np.random.default_rng(0)
    for name in ("depth", "rank", "continues_spine"):
        shuffled = replace(places, **{name: random.permutation(getattr(places, name))})
        assert farthest(shuffled) > 7, name
    judged = held_out(places, texts, (DEPTH, RANKS), 8.0)
    assert judged is not None
    assert judged.drafts + judged.fitted_drafts == len(places)
    assert judged.log_loss_after < judged.log_loss_before - 0.002


def test_a_trees_calibration_corrects_what_was_measured_here() -> None:
    """The places of serving are those that are counted: exactly the law comes back."""
    texts = texts_of(5, 9)
    drafter = PlacedDrafter(texts, RIGHT, FACTORS)
    table = KvTable(5, 20, CPU)
    proposal = drafter.propose(ReplayTarget(texts, table, None, CPU).draft_batch(), FULL)
    found = Calibration(FACTORS.tolist())(proposal.parent_index, proposal.log_q, DEPTH)
    values = sorted(found.double().exp().flatten().tolist())
    expected = sorted(RIGHT * (5 * FULL // RANKS))
    assert values == pytest.approx(expected, abs=1e-6)


def places(*rows: tuple[int, int, int, bool, float, bool]) -> Places:
    """Sequence, depth, rank, spine, q, right."""
    sequence, depth, rank, spine, q, right = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    return Places(sequence, depth, rank, spine, np.log(q).astype(np.float32), right)


def test_a_prior_holds_back_what_was_rarely_seen() -> None:
    found = PlaceCounts.of(
        places(*[(0, 1, 0, True, 0.5, True)] * 6, *[(0, 1, 0, True, 0.5, False)] * 2,
               (0, 2, 0, False, 0.25, False), (0, 2, 5, True, 0.75, True),
               (0, 9, 1, True, 0.5, True)), 2, 2,
    )  # fmt: skip
    assert found.reached.tolist() == [[[0, 8], [0, 0]], [[1, 0], [0, 2]]]
    assert found.right.tolist() == [[[0, 6], [0, 0]], [[0, 0], [0, 2]]]
    assert found.sum_q == pytest.approx(np.array([[[0, 4], [0, 0]], [[0.25, 0], [0, 1.25]]]))
    factor = np.exp(fit(found, prior=2))
    assert factor == pytest.approx(np.array([[[1, 8 / 6], [1, 1]], [[2 / 2.25, 1], [1, 4 / 3.25]]]))
    assert np.abs(fit(found, prior=1e9)).max() < 1e-6


def test_answers_to_one_prompt_stay_together_in_halves_of_equal_size() -> None:
    texts = texts_of(21, 5)
    again = [KnownText("b", text.prompt, (1, 2)) for text in texts]
    half = first_half([*texts, *again])
    assert (half[:21] == half[21:]).all()
    assert half[:21].sum() == 11
    assert (first_half(texts[::-1])[::-1] == half[:21]).all()
    one = places((0, 1, 0, True, 0.5, True))
    assert held_out(one, texts[:1], (1, 1), 8.0) is None


def test_the_log_loss_of_another_half_by_hand() -> None:
    texts = texts_of(2, 5)
    known = int(first_half(texts).argmax())
    rows = [(known, 1, 0, True, 0.8, i < 2) for i in range(4)]
    other = [(1 - known, 1, 0, True, 0.4, True), (1 - known, 1, 0, True, 1.0, False)]
    found = held_out(places(*rows, *other), texts, (1, 1), 1.0)
    factor = (2 + 1) / (3.2 + 1)
    assert found is not None
    before, after = -math.log(0.4) - math.log(1e-6), -math.log(0.4 * factor) - math.log(1 - factor)
    assert (found.log_loss_before, found.log_loss_after) == pytest.approx(
        (before / 2, after / 2), rel=1e-5
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline of n-grams, and answers that repeat themselves with slips."""
    write_pipeline(tmp_path / "p.yaml")
    random = np.random.default_rng(0)
    outputs = []
    for i in range(6):
        tokens = np.tile(np.arange(20, 25 + i), 12)[:50]
        outputs.append(np.where(random.random(50) < 0.15, random.integers(20, 30, 50), tokens))
    write_answers(tmp_path / "answers.jsonl", [output.tolist() for output in outputs])
    return tmp_path


def write_pipeline(file: Path, **sections: Any) -> Path:
    text = {
        "version": 1, "target": "example/model", "drafter": "ngram",
        "tree": {"kind": "best_first", "depth": 4}, "verify": "sample_and_walk",
        "budget": {"kind": "fixed", "draft_budget": 6}, "engine": {"device": "cpu"}, **sections,
    }  # fmt: skip
    file.write_text(json.dumps(text))
    return file


def write_answers(file: Path, outputs: Sequence[Sequence[int]]) -> Path:
    lines = [
        to_line(Answer(i, str(i), f"{i:064x}", ({"role": "user", "content": "-"},), "length", 3,
                       len(output), (1, 2, 3 + i), tuple(output)))
        for i, output in enumerate(outputs, 1)
    ]  # fmt: skip
    file.write_bytes(b"".join(lines))
    return file


def run(*args: object) -> Result:
    return CliRunner().invoke(calibrate, [str(arg) for arg in args], catch_exceptions=False)


def planned(file: Path, *overrides: str) -> Plan:
    return plan_file(file, overrides, host_facts=HostFacts.unknown())


def test_it_writes_a_file_that_a_tree_reads(folder: Path) -> None:
    out = folder / "new" / "calibration.json"
    found = run(folder / "p.yaml", "--answers", folder / "answers.jsonl", "-o", out)
    assert found.exit_code == 0, found.output
    written = CalibrationFile.model_validate_json(out.read_text())
    shape = np.array(written.log_factor).shape
    assert shape == np.array(written.reached).shape == (4, 8, 2)
    assert (np.array(written.right) <= np.array(written.reached)).all()
    assert written.held_out is not None
    assert written.held_out.drafts + written.held_out.fitted_drafts == np.sum(written.reached)
    facts = written.provenance
    assert facts["data_sha256"].keys() == {str(folder / "answers.jsonl")}
    assert (facts["draft_budget"], facts["prior"], facts["sequences"]) == (63, 8.0, 6)
    first = f"{math.exp(written.log_factor[0][0][1]):.2f} ({written.reached[0][0][1]})"
    for text in (
        "parent on the spine", "parent off the spine", "7 and up", first, "were not compared with",
        f"the {written.held_out.drafts} of the other: ", str(out),
    ):  # fmt: skip
        assert text in found.stdout

    pipeline = write_pipeline(
        folder / "q.yaml",
        tree={"kind": "best_first", "depth": 4, "calibration": "./new/calibration.json"},
    )
    plan = planned(pipeline)
    assert (
        plan.tree.options["calibration"]["log_factor"] == json.loads(out.read_text())["log_factor"]
    )
    builder = bind(plan).tree_builder
    assert isinstance(builder, BestFirstBuilder)
    assert plan.hash != planned(folder / "p.yaml").hash
    data = json.loads(out.read_text())
    out.write_text(json.dumps({**data, "provenance": {}, "held_out": None}))
    assert planned(pipeline).hash == plan.hash, "where the numbers come from is no part of a plan"
    data["log_factor"][3][7][1] += 0.25
    out.write_text(json.dumps(data))
    assert planned(pipeline).hash != plan.hash


def test_json_is_what_it_writes_over_an_older_file(folder: Path) -> None:
    out = folder / "calibration.json"
    out.write_text("older")
    found = run(folder / "p.yaml", "--answers", folder / "answers.jsonl", "-o", out, "--ranks", 2,
                "--budget", 3, "--prior", 1, "--format", "json")  # fmt: skip
    assert found.exit_code == 0, found.output
    assert found.stdout == out.read_text()
    data = json.loads(found.stdout)
    assert np.array(data["log_factor"]).shape == (3, 2, 2), "three drafts reach depth 3"
    expected = np.log((np.array(data["right"]) + 1) / (np.array(data["sum_q"]) + 1))
    assert np.array(data["log_factor"]) == pytest.approx(expected, abs=1e-5)


def test_the_pipelines_own_corrections_are_left_out(folder: Path) -> None:
    """A second calibration starts from q as the drafter says it, and from trees of every size."""
    tree = {"kind": "best_first", "depth": 4, "width": 2, "calibration": "./old.json",
            "cost": [[0, 1.0], [8, 9.0]]}  # fmt: skip
    own = write_pipeline(folder / "q.yaml", tree=tree)
    results = []
    set_too = ["--set", "tree.width=3", "--set", "budget.draft_budget=2"]
    for file, overrides in ((folder / "p.yaml", []), (own, []), (own, set_too)):
        found = run(file, "--answers", folder / "answers.jsonl", "-o", folder / "c.json",
                    "--format", "json", *overrides)  # fmt: skip
        assert found.exit_code == 0, found.output
        results.append({**json.loads(found.stdout), "provenance": None})
    assert results[0] == results[1] == results[2]
    static = {"kind": "static", "paths": [[0], [0, 0], [1]]}
    own = write_pipeline(own, tree=static, budget={"kind": "fixed", "draft_budget": 3})
    assert uncalibrated(own, (), 63).reach == 2


def test_evaluations_find_a_calibration_beside_the_pipeline(folder: Path) -> None:
    """Trees are compared by overrides, which by themselves look in the working directory."""
    write_calibration(folder / "c.json")
    tree = {"kind": "best_first", "depth": 4, "calibration": "./c.json"}
    file = write_pipeline(folder / "q.yaml", tree=tree)
    overrides = ("tree.width=3", "budget.draft_budget=2")
    compared = grid(file, overrides, trees=(), budgets=(6,), min_survival=0.0, load_of_policy=1)
    assert compared.configurations[0].plan.hash == planned(file, "tree.width=3").hash
    assert [c.name for c in compared.configurations] == ["best_first 6", "chain 4"]


def test_what_cannot_be_calibrated_is_named(folder: Path) -> None:
    answers, out = folder / "answers.jsonl", folder / "c.json"
    none = folder / "none.yaml"
    none.write_text('{"version": 1, "target": "example/model", "drafter": "none"}')
    drawn = write_pipeline(folder / "drawn.yaml", tree={"kind": "chain", "depth": 6}, drafter={
        "kind": "block", "checkpoint": "./head", "drafts": "drawn"})  # fmt: skip
    new = write_answers(folder / "new.jsonl", [range(100 * i, 100 * i + 30) for i in range(1, 4)])
    for file, texts, message in (
        (none, answers, "the drafter is none, so that there is nothing to evaluate"),
        (drawn, answers, f"{drawn}: drawn drafts are verified whatever they are worth, so that "
                         "there is nothing to calibrate: set drafter.drafts to best"),
        (folder / "p.yaml", new, "nothing was drafted for these answers: there is nothing to "
                                 "measure"),
        (folder / "p.yaml", write_answers(folder / "short.jsonl", [[4]]),
         "no answer of 2 tokens or more in"),
    ):  # fmt: skip
        found = run(file, "--answers", texts, "-o", out)
        assert (found.exit_code, message in found.output) == (2, True), found.output
    for arguments in (
        ["--answers", answers, "--prior", 0],
        ["--answers", answers, "--ranks", 0],
        [],
    ):
        assert run(folder / "p.yaml", "-o", out, *arguments).exit_code == 2
    assert not out.exists()


def test_factors_that_do_not_help_are_said_not_to(folder: Path) -> None:
    """One half of the prompts is always right, the other never after the first repetition."""
    texts = [KnownText("a", (1, 2, 3 + i), ()) for i in range(1, 5)]
    outputs = [
        [7, 8] * 20 if first else [token for i in range(20) for token in (7, 30 + i)]
        for first in first_half(texts)
    ]
    answers = write_answers(folder / "odd.jsonl", outputs)
    command = [folder / "p.yaml", "--answers", answers, "-o", folder / "c.json"]
    found = run(*command, "--set", "drafter={kind: ngram, min_match: 1}")
    assert found.exit_code == 0, found.output
    assert "the factors do not help there: give more answers, or leave" in found.stdout
    write_answers(answers, [[7, 8] * 20])
    found = run(*command)
    assert "one prompt alone has drafts: whether the factors help others" in found.stdout


def test_an_interrupt_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specstack.evaluation.evaluate.run_batch", interrupt)
    out = folder / "c.json"
    found = run(folder / "p.yaml", "--answers", folder / "answers.jsonl", "-o", out)
    assert (found.exit_code, out.exists()) == (130, False)


def test_the_command_is_in_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "calibrate", "--help"]) == 0
    assert "CALIBRATION.json" in capsys.readouterr().out


def test_its_examples_are_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    text = re.sub(r"\n +--", " --", f"{calibrate.help}\n{docs}")
    examples = re.findall(r"^ *specstack draft calibrate (.+)$", text, re.M)
    assert len(examples) == 3
    monkeypatch.chdir(folder)
    for example in examples:
        calibrate.make_context("calibrate", example.split())


def write_calibration(file: Path, **changes: Any) -> Path:
    counts = [[[0, 1], [0, 1]]]
    data = {"model_type": "specstack_calibration", "log_factor": [[[0.0, -0.5], [0.0, -0.25]]],
            "reached": counts, "right": counts, "sum_q": counts, "held_out": None,
            "provenance": {}, **changes}  # fmt: skip
    file.write_text(json.dumps({name: value for name, value in data.items() if value != "gone"}))
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "cannot read {file}: No such file or directory; `specstack draft calibrate` writes"
               " one"),
        (b"log_factor: 1", "{file} is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[1]", "{file} has model_type None; a calibration has 'specstack_calibration'"),
        ({"model_type": "specstack_head"},
         "{file} has model_type 'specstack_head'; a calibration has 'specstack_calibration'"),
        ({"log_factor": [[[0.0], [0.0, 1.0]]]},
         "{file} is not a calibration: log_factor.0.0.1: Field required"),
        ({"log_factor": "gone"}, "{file} is not a calibration: log_factor: Field required"),
        ({"log_factor": [[[0.0, math.nan], [0.0, 0.0]]]},
         "{file} is not a calibration: log_factor.0.0.1: Input should be a finite number"),
        ({"log_factor": []},
         "{file} is not a calibration: log_factor: expected the same number of ranks at every"
         " depth, one at least, found []"),
        ({"log_factor": [[[0, 0]], [[0, 0], [0, 0]]]},
         "{file} is not a calibration: log_factor: expected the same number of ranks at every"
         " depth, one at least, found [1, 2]"),
        ({"right": [[[0, 0]]]},
         "{file} is not a calibration: right: expected [2] ranks as log_factor has, found [1]"),
        ({"reached": [[[0, -1], [0, 0]]]},
         "{file} is not a calibration: reached.0.0.1: Input should be greater than or equal to 0"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_calibration_is_named_where_the_tree_names_it(
    changes: dict[str, Any] | bytes | None, message: str, folder: Path
) -> None:
    file = folder / "c.json"
    if isinstance(changes, bytes):
        file.write_bytes(changes)
    elif changes is not None:
        write_calibration(file, **changes)
    tree = {"kind": "best_first", "calibration": "./c.json"}
    pipeline = write_pipeline(folder / "q.yaml", tree=tree)
    with pytest.raises(PlanError) as error:
        planned(pipeline)
    [problem] = error.value.problems
    assert problem.message == message.format(file=file)
    assert (problem.path, problem.position.file) == ("tree.calibration", str(pipeline))
    assert problem.position.line == 1
