"""Run files: defaults, and every mistake at its place in the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from specstack.cli import main
from specstack.training.run_config import Run
from specstack.training.run_file import load_run

RUNS = Path(__file__).parents[2] / "specstack/training/runs"
SOUND = """version: 1
target: ./target
answers: {files: [answers.jsonl]}
head:
  form: autoregressive
  context: {source: hidden, target_layers: [1]}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Run:
    (tmp_path / "run.yaml").write_text(text)
    return load_run(tmp_path / "run.yaml", overrides).run


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ValueError, match=r"run\.yaml|--set") as error:
        load(tmp_path, text, *overrides)
    return [line.removeprefix(f"{tmp_path}/") for line in str(error.value).splitlines()]


@pytest.mark.parametrize("file", sorted(RUNS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_example_is_sound(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "train", str(file), "-o", "unused", "--check"]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    run = load(tmp_path, SOUND)
    assert run.target.model == "./target"
    assert (run.optimiser.betas, run.loss.kind, run.device) == ((0.9, 0.95), "forward_kl", "auto")
    assert run.depth == run.head.block_size == 8


def test_a_block_drafts_one_token_less_than_it_has_slots(tmp_path: Path) -> None:
    assert load(tmp_path, SOUND, "head.form=block").depth == 7


def test_overrides_replace_values(tmp_path: Path) -> None:
    run = load(tmp_path, SOUND, "optimiser.lr=3e-4", "schedule.max_steps=7", "seed=5")
    assert (run.optimiser.lr, run.schedule.max_steps, run.seed) == (3e-4, 7, 5)


def test_every_problem_is_reported_at_its_place(tmp_path: Path) -> None:
    text = """version: 2
target: {modle: x}
answers: {files: [], max_length: 3}
head:
  form: blocky
  context: {source: hidden, layers: [1]}
optimizer: {}
optimiser: {betas: [0.9, 1]}
schedule: {stages: [{until: 0.5, freeze: [fusion]}]}
"""
    assert problems(tmp_path, text) == [
        "run.yaml:1:10: version: expected one of 1, found 2",
        "run.yaml:2:9: target.model: missing"
        " (Hugging Face id, local folder (./ or /), or packaged:NAME)",
        "run.yaml:2:10: target.modle: unknown option of target:"
        " it has model, dtype, attention; did you mean 'model'?",
        "run.yaml:3:18: answers.files: expected at least 1 item, found 0",
        "run.yaml:3:34: answers.max_length: expected at least 8, found 3",
        "run.yaml:5:9: head.form: expected one of block, autoregressive, found 'blocky';"
        " did you mean 'block'?",
        "run.yaml:6:29: head.context.layers: unknown option of context: it has source,"
        " target_layers, kv_layers, kv_mix, fusion, sum_rank; did you mean 'kv_layers'?",
        "run.yaml:7:1: optimizer: unknown option of a run: it has version, target, answers, head,"
        " start, optimiser, anchors, loss, schedule, remedies, features, logging, checkpoints,"
        " device, seed; did you mean 'optimiser'?",
        "run.yaml:8:26: optimiser.betas.1: expected less than 1, found 1.0",
        "run.yaml:9:43: schedule.stages.0.freeze.0:"
        " expected one of input, layers, kv, corrector, found 'fusion'",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "remedies.gate_floor=0.5",
            "remedies.gate_floor: needs head.context.fusion gated_delta: others have no gate",
        ),
        (
            "remedies.prefix_mix=0.2",
            "remedies.prefix_mix: needs an autoregressive head that reads the target's KV"
            " (source kv or hybrid)",
        ),
        (
            "schedule.stages=[{until: 0.5, freeze: [kv]}]",
            "schedule.stages.0.freeze.0: the head has no weights of group kv",
        ),
        (
            "start={from_target: false, layers: [1]}",
            "start.layers: needs start.from_target: nothing is copied otherwise",
        ),
        ("features.source=cache", "features: source cache needs a folder, source on_the_fly"),
        (
            "schedule.stages=[{until: 0.5, freeze: []}, {until: 0.2, freeze: []}]",
            "schedule.stages: until must rise from stage to stage, found [0.5, 0.2]",
        ),
        ("target.model=a b", "target.model: 'a b' is not a model"),
        ("seed=-1", "seed: expected at least 0, found -1"),
        ("optimiser.lr=0", "optimiser.lr: expected above 0, found 0"),
    ],
)
def test_sections_must_agree(tmp_path: Path, override: str, message: str) -> None:
    assert any(message in line for line in problems(tmp_path, SOUND, override))


def test_a_wrong_run_ends_with_code_2_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(SOUND.replace("hidden", "hiden"))
    code = main(["draft", "train", str(tmp_path / "run.yaml"), "-o", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith(f"{tmp_path}/run.yaml:6:21: head.context.source: expected one of")
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_help_names_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "train", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("RUN.yaml", "--output", "--set", "--stop-at", "--check", "torchrun", "130"):
        assert word in text
    assert main(["draft", "--help"]) == 0
    assert "train " in capsys.readouterr().out
