"""Whole runs on a tiny target: learning, going on to the bit, stopping, refusing."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specstack.cli import main
from specstack.models import store
from specstack.models.heads.checkpoint import load_head
from specstack.models.heads.tables import TargetTables
from specstack.training import tiny
from specstack.training.trainer import Trainer

BLOCK = {
    "form": "block",
    "block_size": 4,
    "context": tiny.CONTEXTS["hidden"],
    "conditioning": {"kind": "markov", "rank": 16},
    "draft_vocab_size": 100,
}
SEEDED = {**BLOCK, "slots": "seeded"}
AUTOREGRESSIVE = {"form": "autoregressive", "block_size": 3, "context": tiny.CONTEXTS["hidden"]}
GATED = {**AUTOREGRESSIVE, "context": tiny.CONTEXTS["gated"]}
STEPS = {"schedule": {"max_steps": 4}, "checkpoints": {"every": 2}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save_target(folder / "target")
    tiny.save_answers(folder / "answers.jsonl", folder / "target")
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_run(files: Path, folder: Path, head: dict[str, Any], /, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(tiny.run_text(files / "target", files / "answers.jsonl", head, **sections))
    return path


def train(run: Path, output: Path, *options: str) -> int:
    return main(["draft", "train", str(run), "-o", str(output), *options])


def weights(output: Path, step: int) -> dict[str, torch.Tensor]:
    found = load_file(output / f"checkpoints/step-{step:08d}/model.safetensors")
    return {name: value.clone() for name, value in found.items()}  # not a view of the file


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def curve(output: Path, name: str = "log") -> list[dict[str, str]]:
    with (output / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "head", [BLOCK, SEEDED, AUTOREGRESSIVE], ids=["block", "seeded", "autoregressive"]
)
def test_a_head_learns_its_texts_by_heart(files: Path, tmp_path: Path, head) -> None:
    head = {**head, "intermediate_size": 192}
    head.pop("draft_vocab_size", None)
    sections = {
        "schedule": {"max_steps": 260},
        "optimiser": {"batch_size": 8, "lr": 1e-2},
        "anchors": {"per_sequence": None},
        "answers": {"holdout_share": 0.3},
        "logging": {"every": 100, "evaluate_every": 1000},
    }
    run = write_run(files, tmp_path, head, **sections)
    before = Trainer.look
    try:  # look at what it was trained on
        Trainer.look = lambda self: _look_at_training(self, before)  # type: ignore[method-assign]
        assert train(run, tmp_path / "out") == 0
    finally:
        Trainer.look = before  # type: ignore[method-assign]
    (row,) = curve(tmp_path / "out", "holdout")
    assert min(float(row[f"alpha_{k}"]) for k in (1, 2, 3)) > 0.9, row
    assert float(row["accept_length"]) > 3.5
    losses = [float(row["loss"]) for row in curve(tmp_path / "out")]
    assert losses[-1] < 0.1 * losses[0]


def _look_at_training(trainer: Trainer, look):
    corpus = trainer.parts.corpus
    trained = corpus.texts[: corpus.num_train]
    trainer.parts.corpus = type(corpus)([*trained, *trained], corpus.num_train)
    return look(trainer)


VARIANTS = {
    "kv": {**BLOCK, "context": tiny.CONTEXTS["kv"]},
    "sum": {**BLOCK, "context": tiny.CONTEXTS["sum"]},
    "gru": {**BLOCK, "conditioning": {"kind": "gru", "rank": 8}},
    "refresh": {**BLOCK, "conditioning": {"kind": "refresh"}},
    "bidirectional": {**BLOCK, "mask": "bidirectional"},
    "kv_linear": {**AUTOREGRESSIVE, "context": tiny.CONTEXTS["kv_linear"], "extra_norms": True},
    "gated": GATED,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_head_trains(files: Path, tmp_path: Path, name: str) -> None:
    mixes = "kv" in VARIANTS[name]["context"]["source"] and name == "kv_linear"
    run = write_run(
        files, tmp_path, VARIANTS[name], **STEPS, answers={"holdout_share": 0.3},
        loss={"kind": "lk", "auxiliary": {"ce": 0.1}}, optimiser={"dtype": "bfloat16"},
        remedies={"prefix_mix": 0.3 if mixes else 0.0},
    )  # fmt: skip
    assert train(run, tmp_path / "out") == 0
    first, *_, last = curve(tmp_path / "out")
    assert 0 < float(last["loss"]) < float(first["loss"])
    target = load_file(files / "target/model.safetensors")
    head = load_head(tmp_path / "out/head", TargetTables.from_weights(target))
    assert head.config.target.fingerprint is not None
    assert (tmp_path / "out/head/README.md").read_text().startswith("# Draft head for ")
    assert {p.name for p in (tmp_path / "out/plots").iterdir()} == {
        "loss.png", "alpha.png", "accept_length.png",
    }  # fmt: skip


def test_the_finished_head_may_be_bfloat16(files: Path, tmp_path: Path) -> None:
    sections = {**STEPS, "checkpoints": {"every": 2, "head_dtype": "bfloat16"}}
    assert train(write_run(files, tmp_path / "run", BLOCK, **sections), tmp_path / "out") == 0
    kept, finished = (
        weights(tmp_path / "out", 4),
        load_file(tmp_path / "out/head/model.safetensors"),
    )
    assert kept["norm.weight"].dtype == torch.float32, "control: training goes on from float32"
    assert torch.equal(finished["d2t"], kept["d2t"])
    for name, value in kept.items():
        assert torch.equal(
            finished[name], value.to(torch.bfloat16) if value.is_floating_point() else value
        )


def test_a_run_goes_on_from_an_earlier_head(files: Path, tmp_path: Path, capsys) -> None:
    first = write_run(files, tmp_path / "one", BLOCK, schedule={"max_steps": 100})
    assert train(first, tmp_path / "first") == 0
    start = {"start": {"head": str(tmp_path / "first/head")}, "schedule": {"max_steps": 1}}
    assert train(write_run(files, tmp_path / "two", BLOCK, **start), tmp_path / "second") == 0
    losses = [float(row["loss"]) for row in curve(tmp_path / "first")]
    (loss,) = (float(row["loss"]) for row in curve(tmp_path / "second"))
    assert abs(loss - losses[-1]) < 0.2 * abs(loss - losses[0]), "control: a new head starts higher"
    vocabularies = [
        load_file(tmp_path / n / "head/model.safetensors")["d2t"] for n in ("first", "second")
    ]
    assert torch.equal(*vocabularies)
    capsys.readouterr()
    other = write_run(files, tmp_path / "three", {**BLOCK, "block_size": 3}, **start)
    assert train(other, tmp_path / "third") == 2
    message = capsys.readouterr().err
    assert "start.head" in message
    assert "block_size 4, not 3" in message
    assert "hidden_size" not in message, "its target is not what differs"


def test_gates_are_logged_and_stages_freeze(files: Path, tmp_path: Path) -> None:
    remedies = {"gate_floor": 0.5, "branch_dropout": 0.2, "kv_only_weight": 0.3, "prefix_mix": 0.2}
    stages = [{"until": 0.5, "freeze": ["layers", "input"]}]
    run = write_run(
        files, tmp_path, GATED, remedies=remedies,
        schedule={"max_steps": 4, "stages": stages}, checkpoints={"every": 1, "keep": 4},
    )  # fmt: skip
    assert train(run, tmp_path / "out") == 0
    row = curve(tmp_path / "out")[0]
    assert all(0.5 < float(row[f"gate_{k}"]) < 1 for k in (1, 2, 3))
    assert float(row["grad_kv"]) > 0
    assert float(row["grad_layers"]) > 0
    one, two, four = (weights(tmp_path / "out", step) for step in (1, 2, 4))
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert moved
    assert all(".cross_attn." in name or ".delta." in name for name in moved)
    assert not torch.equal(two["input_proj.weight"], four["input_proj.weight"])


@pytest.mark.parametrize("head", [BLOCK, GATED], ids=["block", "gated"])
def test_two_halves_are_one_whole_to_the_bit(files: Path, tmp_path: Path, head) -> None:
    remedies = {"branch_dropout": 0.5, "prefix_mix": 0.2} if head is GATED else {}
    sections = {"optimiser": {"accumulation": 2, "weight_decay": 0.1}, "remedies": remedies}
    run = write_run(files, tmp_path, head, **STEPS, **sections)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(run, whole) == 0
    assert train(run, halves, "--stop-at", "2") == 0
    assert not (halves / "head").exists()
    assert train(run, halves) == 0
    assert same(weights(whole, 4), weights(halves, 4))
    states = [torch.load(o / "checkpoints/step-00000004/trainer.pt") for o in (whole, halves)]
    for name, values in states[0]["optimiser"]["state"].items():
        for key, value in values.items():
            assert torch.equal(value, states[1]["optimiser"]["state"][name][key]), (name, key)
    losses = [[row["loss"] for row in curve(output)] for output in (whole, halves)]
    assert losses[0] == losses[1]
    assert [row["step"] for row in curve(halves)] == ["1", "2", "3", "4"]


def test_an_interrupt_leaves_a_checkpoint(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    run = write_run(files, tmp_path, BLOCK, schedule={"max_steps": 4}, checkpoints={"every": 100})
    step = Trainer._step

    def interrupted(self: Trainer) -> None:
        if self.progress.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        step(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_step", interrupted)
        assert train(run, tmp_path / "out") == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out/checkpoints").iterdir()] == ["step-00000003"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train(run, tmp_path / "out") == 0
    assert train(run, tmp_path / "whole") == 0
    assert same(weights(tmp_path / "out", 4), weights(tmp_path / "whole", 4))


def test_a_death_while_a_checkpoint_is_written_leaves_the_one_before(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(files, tmp_path, BLOCK, **STEPS)
    write = store.write_manifest

    def dies(folder: Path, facts: dict[str, Any]) -> None:
        if facts.get("step") == 4:
            raise OSError(28, "No space left on device", str(folder))
        write(folder, facts)

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_manifest", dies)
        assert train(run, tmp_path / "out") == 1
    assert [p.name for p in (tmp_path / "out/checkpoints").iterdir()] == ["step-00000002"]
    assert train(run, tmp_path / "out") == 0


def test_a_killed_run_goes_on_after_its_last_checkpoint(files: Path, tmp_path: Path) -> None:
    sections = {"schedule": {"max_steps": 60}, "checkpoints": {"every": 5}}
    run = write_run(files, tmp_path, BLOCK, **sections, logging={"every": 20})
    command = [sys.executable, "-m", "specstack", "draft", "train", str(run)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "out")], env=environ, stderr=subprocess.DEVNULL
    )
    checkpoint = tmp_path / "out/checkpoints/step-00000010"
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert train(run, tmp_path / "out") == 0
    assert train(run, tmp_path / "whole") == 0
    assert same(weights(tmp_path / "out", 60), weights(tmp_path / "whole", 60))
    steps = [int(row["step"]) for row in curve(tmp_path / "out")]
    assert steps == list(range(1, 61))


def test_a_damaged_checkpoint_is_not_used(files: Path, tmp_path: Path, capsys) -> None:
    run = write_run(files, tmp_path, BLOCK, **STEPS)
    out = tmp_path / "out"
    assert train(run, out) == 0
    before = weights(out, 4)
    file = out / "checkpoints/step-00000004/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert train(run, out) == 0
    assert "step-00000004 is damaged (model.safetensors has other con" in capsys.readouterr().err
    assert same(weights(out, 4), before)


def test_only_the_latest_checkpoints_are_kept(files: Path, tmp_path: Path) -> None:
    sections = {"schedule": {"max_steps": 6}, "checkpoints": {"every": 1, "keep": 2}}
    assert train(write_run(files, tmp_path, BLOCK, **sections), tmp_path / "out") == 0
    names = sorted(p.name for p in (tmp_path / "out/checkpoints").iterdir())
    assert names == ["step-00000005", "step-00000006"]


def test_another_run_in_the_same_folder_is_refused(files: Path, tmp_path: Path, capsys) -> None:
    run = write_run(files, tmp_path, BLOCK, **STEPS)
    out = tmp_path / "out"
    assert train(run, out, "--stop-at", "1") == 0
    capsys.readouterr()
    assert train(run, out, "--set", "optimiser.lr=1e-4", "--set", "logging.every=3") == 2
    error = capsys.readouterr().err
    assert f"{out} holds another run:\n  optimiser: recorded {{" in error
    assert '"lr": 0.0001' in error
    assert "Traceback" not in error
    assert train(run, out, "--set", "logging.every=3") == 0


REFUSED = {
    "head={form: block, context: {source: kv}}": (
        "head: context.source kv takes no context.target_layers",
        "context.source kv needs context.kv_layers and context.kv_mix",
    ),
    "head.context.target_layers=[9]": ("head: context.target_layers names layer 9", "0 to 3"),
    "target.model=./nowhere": ("target.model: the folder", "nowhere has no config.json"),
    "target.model=packaged:nothing": ("target.model: ", "nothing"),
    "answers.files=[/nowhere.jsonl]": ("answers.files.0: the file /nowhere.jsonl", "not exist"),
    "answers.holdout_share=0.999": ("nothing to train on in", "(8 lines)"),
    "start.layers=[0, 1]": ("2 target layers for the 1 of the head", ""),
    "features={source: cache, folder: cache, max_gb: 1e-6}": ("features.max_gb 1e-06", "raise it"),
}  # fmt: skip


@pytest.mark.parametrize("override", REFUSED)
def test_what_does_not_fit_is_refused_without_a_traceback(
    files: Path, tmp_path: Path, capsys, override: str
) -> None:
    run = write_run(files, tmp_path, BLOCK, **STEPS)
    code = train(run, tmp_path / "out", "--set", override)
    error = capsys.readouterr().err
    assert code == 2, error
    assert "Traceback" not in error
    for words in REFUSED[override]:
        assert words in error


def test_cached_features_are_the_targets_in_bfloat16(files: Path, tmp_path: Path, capsys) -> None:
    sections = {**STEPS, "target": {"dtype": "bfloat16"}}
    run = write_run(files, tmp_path, BLOCK, **sections)
    cached = f"features={{source: cache, folder: {tmp_path}/cache}}"
    assert train(run, tmp_path / "direct") == 0
    assert train(run, tmp_path / "cached", "--set", cached) == 0
    # Padding differs, hence rounding in bfloat16: the same features, not the same bits.
    rows = zip(curve(tmp_path / "direct"), curve(tmp_path / "cached"), strict=True)
    for one, two in rows:
        assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=0.05)
    (shard,) = (tmp_path / "cache").glob("*.safetensors")
    assert {t.dtype for t in load_file(shard).values()} == {torch.bfloat16}
    whole = shard.read_bytes()
    for damaged in (whole[:-7], whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:]):
        shard.write_bytes(damaged)
        capsys.readouterr()
        assert train(run, tmp_path / "cached", "--set", cached) == 0
        error = capsys.readouterr().err
        assert "damaged or half-written, made again: shard-00000.safetensors" in error
        assert shard.read_bytes() == whole


def test_a_cache_of_other_features_is_refused(files: Path, tmp_path: Path, capsys) -> None:
    cached = {"source": "cache", "folder": str(tmp_path / "cache")}
    run = write_run(files, tmp_path, BLOCK, **STEPS, features=cached)
    assert train(run, tmp_path / "one") == 0
    assert train(run, tmp_path / "two", "--set", "head.context.target_layers=[2]") == 2
    assert "target_layers: cached [1, 3], now [2]" in capsys.readouterr().err


def test_two_processes_have_the_losses_of_one(files: Path, tmp_path: Path) -> None:
    run = write_run(files, tmp_path, BLOCK, **STEPS, answers={"holdout_share": 0.3})
    assert train(run, tmp_path / "one") == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "specstack", "draft", "train", str(run), "-o", str(tmp_path / "two")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True)
    for one, two in rows:
        assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=1e-4)
        assert one["answer_tokens"] == two["answer_tokens"]
    one, two = (weights(tmp_path / name, 4) for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-4)
    config = json.loads((tmp_path / "two/head/config.json").read_text())
    assert config["form"] == "block"
