"""`specstack draft train` below its command line: builds all parts of a run and trains.

The folder of a run holds `run.json` (what was asked for), `log.csv`, `holdout.csv`, `checkpoints/`
and, when it is done, `head/` and `plots/`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from specstack import __version__
from specstack.models import store
from specstack.models.heads.checkpoint import Head, load_head, make_head, save_head
from specstack.models.heads.config import HeadConfig
from specstack.training import processes
from specstack.training.answer_file import InUse
from specstack.training.checkpoints import Checkpoints, Progress, read_state
from specstack.training.curves import plot_curves, read_curve
from specstack.training.errors import RunError
from specstack.training.feature_sources import FeatureCache, FeatureSource, OnTheFly
from specstack.training.objective import Objective
from specstack.training.processes import Processes, full
from specstack.training.run_config import Run
from specstack.training.run_file import RunFile
from specstack.training.run_head import head_config, new_head
from specstack.training.target_model import FrozenTarget, locate, read_shape, tokeniser
from specstack.training.texts import Text, Texts, answer_counts, coverage, read_texts
from specstack.training.trainer import Corpus, Parts, Trainer

FORMAT = 1
_MAY_CHANGE = ("logging", "checkpoints", "features", "device")
_SAMPLE = 8
Echo = Callable[[str], None]


@dataclass(frozen=True)
class Summary:
    """What came out."""

    steps: int
    num_steps: int
    answer_tokens: int
    accept_length: float | None
    """On the holdout, the bonus included; None without a holdout."""
    head: Path | None
    """The finished head; None before the last step."""


def train(file: RunFile, output: Path, stop_at: int | None, echo: Echo) -> Summary | None:
    """Train, or go on training, in the folder `output`; of several processes the first sums up.

    Raises:
        SpecError: the run does not fit its target.
        RunError, BadAnswers, HeadError: files, cache or the earlier part of the run do not fit.
        InUse: another process trains there.
        Interrupted: a signal came; a checkpoint is written.
    """
    mine = processes.start(file.run.device, file.run.optimiser.batch_size)
    output.mkdir(parents=True, exist_ok=True)
    say: Echo = echo if mine.is_first else lambda text: None

    def refuse(pid: str) -> None:
        raise InUse(f"{output} is being trained in by process {pid}")

    # Norms of float32 weights read bfloat16 activations where autocast is on: meant, not slow.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    try:
        lock = output / (".lock" if mine.is_first else f".lock-{mine.rank}")
        with store.locked(lock, on_wait=refuse):
            return _train(file, output, stop_at, say, mine)
    finally:
        mine.close()


def _train(
    file: RunFile, output: Path, stop_at: int | None, echo: Echo, mine: Processes
) -> Summary | None:
    run, path = file.run, locate(file)
    shape, target_config = read_shape(path, run.target.model)
    config = head_config(file, shape, target_config)
    texts = read_texts(
        _answer_files(file),
        max_length=min(run.answers.max_length, shape.max_position_embeddings),
        holdout_share=run.answers.holdout_share,
        max_bad_share=run.answers.max_bad_share,
        vocab_size=shape.vocab_size,
        tokenise=tokeniser(path),
    )
    for note in texts.notes:
        echo(note)
    target = FrozenTarget(path, run.target, mine.device)
    config = config.model_copy(
        update={"target": shape.model_copy(update={"fingerprint": target.tables.fingerprint()})}
    )
    _require_same_run(output, run, texts, config, mine)
    head, progress, state = _head(file, output, config, target, texts, echo)
    _describe(texts, head, echo)
    parts = _parts(file, mine, head, texts, target, echo)
    trainer = Trainer(parts, output, progress)
    if state is not None:
        trainer.optimisation.restore(state)
        echo(f"going on after step {progress.step}")
    trainer.train(stop_at)
    is_done = trainer.progress.step == trainer.num_steps
    whole = parts.whole().head
    if not mine.is_first:
        return None
    looks = read_curve(output / "holdout.csv")
    length = float(looks[-1]["accept_length"]) if looks else None
    plot_curves(output / "log.csv", output / "holdout.csv", output / "plots")
    if is_done:
        dtype = getattr(torch, run.checkpoints.head_dtype)
        _publish(whole, output, _card(run, trainer, length), dtype)
    return Summary(
        trainer.progress.step,
        trainer.num_steps,
        trainer.progress.answer_tokens,
        length,
        output / "head" if is_done else None,
    )


def _answer_files(file: RunFile) -> list[Path]:
    found = []
    for i, name in enumerate(file.run.answers.files):
        place = f"answers.files.{i}"
        found.append(file.resolve(place, name))
        if not found[-1].is_file():
            raise file.problem(place, f"the file {found[-1]} does not exist")
    return found


def _head(
    file: RunFile, output: Path, config: HeadConfig, target: FrozenTarget, texts: Texts, echo: Echo
) -> tuple[Head, Progress, dict[str, Any] | None]:
    """The head of the last checkpoint, or a new one."""
    found = Checkpoints(output / "checkpoints", file.run.checkpoints.keep).latest(echo)
    if found is not None:
        progress, state = read_state(found)
        return load_head(found, target.tables), progress, state
    counts = answer_counts(texts.train, config.target.vocab_size)
    tokens = [torch.from_numpy(text.tokens).long() for text in texts.train[:_SAMPLE]]
    sample = pad_sequence(tokens, batch_first=True).to(target.tables.embedding.device)
    return new_head(file, config, target, counts, sample), Progress(), None


def _parts(
    file: RunFile, mine: Processes, head: Head, texts: Texts, target: FrozenTarget, echo: Echo
) -> Parts:
    run = file.run
    everything = [*texts.train, *texts.holdout]
    dtype = getattr(torch, run.optimiser.dtype)
    objective = Objective(head, run.loss, run.depth, dtype).to(mine.device)
    whole = _whole(objective, target, mine)
    mine.shard(objective)
    return Parts(
        run=run,
        corpus=Corpus(everything, len(texts.train)),
        objective=objective,
        source=_source(file, head.config, everything, texts.fingerprint(), target, mine, echo),
        lm_head=target.tables.lm_head,
        processes=mine,
        whole=whole,
    )


def _whole(objective: Objective, target: FrozenTarget, mine: Processes) -> Callable[[], Objective]:
    if mine.size == 1:
        return lambda: objective
    head = objective.head
    same = make_head(head.config, target.tables.to(dtype=torch.float32), head.vocabulary)
    copy = Objective(same, objective.loss, objective.depth, objective.dtype).to(mine.device)

    def gather() -> Objective:
        found = {name: full(value) for name, value in head.state_dict().items()}
        copy.head.load_state_dict(found)
        return copy

    return gather


def _source(
    file: RunFile,
    config: HeadConfig,
    texts: list[Text],
    fingerprint: str,
    target: FrozenTarget,
    mine: Processes,
    echo: Echo,
) -> FeatureSource:
    features, context = file.run.features, config.context
    if features.folder is None:
        return OnTheFly(target, context)
    settings = {
        "target": config.target.fingerprint,
        "target_dtype": target.dtype,
        "target_layers": list(context.target_layers),
        "kv_layers": list(context.kv_layers),
        "texts": fingerprint,
    }
    folder = file.resolve("features.folder", features.folder)
    cache = FeatureCache(folder, texts, settings, mine.device)
    if mine.is_first:
        cache.fill(target, context, features.max_gb, echo)
    mine.wait()
    return cache


def _require_same_run(
    output: Path, run: Run, texts: Texts, config: HeadConfig, mine: Processes
) -> None:
    """Record what is asked for, or refuse to mix it with something else."""
    asked: dict[str, Any] = {
        "format": FORMAT,
        **{k: v for k, v in run.model_dump(mode="json").items() if k not in _MAY_CHANGE},
        "texts": texts.fingerprint(),
        "target_fingerprint": config.target.fingerprint,
    }
    path = output / "run.json"
    if path.exists():
        recorded = json.loads(path.read_bytes())
        different = [
            f"  {name}: recorded {json.dumps(recorded.get(name))}, now {json.dumps(value)}"
            for name, value in asked.items()
            if recorded.get(name) != value
        ]
        if different:
            raise RunError(
                "\n".join(
                    [
                        f"{output} holds another run:",
                        *different,
                        "train in another folder (-o), or go on with the recorded values",
                    ]
                )
            )
    mine.wait()
    if mine.is_first and not path.exists():
        work = output / ".run.json.new"
        work.write_text(json.dumps(asked, indent=2) + "\n", "utf-8")
        os.replace(work, path)


def _describe(texts: Texts, head: Head, echo: Echo) -> None:
    tokens = sum(text.num_answer for text in texts.train)
    weights = sum(weight.numel() for weight in head.parameters())
    echo(
        f"{len(texts.train)} texts with {tokens} answer tokens, {len(texts.holdout)} held out;"
        f" {weights / 1e6:.2f}M weights"
    )
    if head.vocabulary is not None and texts.holdout:
        counts = answer_counts(texts.holdout, head.config.target.vocab_size)
        share = coverage(head.vocabulary, counts)
        echo(f"{len(head.vocabulary.d2t)} draft tokens cover {share:.1%} of the holdout's answers")


def _card(run: Run, trainer: Trainer, accept_length: float | None) -> str:
    measured = "no holdout" if accept_length is None else f"{accept_length:.3f} (bonus included)"
    return "\n".join(
        [
            f"# Draft head for {run.target.model}",
            "",
            f"Trained by specstack {__version__}: {trainer.progress.step} steps,"
            f" {trainer.progress.answer_tokens} answer tokens.",
            f"Accept length of a chain of {run.depth} on the holdout: {measured}.",
            "",
            "```json",
            run.model_dump_json(indent=2),
            "```",
            "",
        ]
    )


def _publish(head: Head, output: Path, card: str, dtype: torch.dtype) -> None:
    with store.work_folder(output / ".head.work") as work:
        save_head(head, work / "head", card, dtype)
        store.write_manifest(work / "head", {"specstack": __version__})
        store.publish(work / "head", output / "head", aside=work / "previous")
