"""The loop: batches, gradients, checkpoints, looks at the holdout. All state is in a checkpoint.

Letters: B sequences, A anchors, K depth.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specstack.training.batches import Batch, Draws, collate, epoch_batches
from specstack.training.checkpoints import Checkpoints, Progress
from specstack.training.curves import Curve
from specstack.training.feature_sources import FeatureSource
from specstack.training.holdout import Holdout, evaluate
from specstack.training.objective import Objective, Seen
from specstack.training.optimisation import Optimisation, falling
from specstack.training.processes import Processes
from specstack.training.run_config import Run
from specstack.training.step_log import StepLog
from specstack.training.texts import Text

HOLDOUT_SEED = "holdout"
"""Anchors on the holdout are the same at every look and in every run."""


class Interrupted(Exception):
    """The run was asked to stop and has written a checkpoint."""


@dataclass(frozen=True)
class Corpus:
    """All texts; a batch names them by their place here."""

    texts: Sequence[Text]
    num_train: int
    """The first ones; the others are the holdout."""


@dataclass
class Parts:
    """What a trainer works with."""

    run: Run
    corpus: Corpus
    objective: Objective
    source: FeatureSource
    lm_head: Tensor
    processes: Processes
    whole: Callable[[], Objective]
    """The objective with all weights in this process; all processes must ask."""


def steps_per_epoch(run: Run, num_train: int) -> float:
    """Steps that see every text once."""
    return -(-num_train // run.optimiser.batch_size) / run.optimiser.accumulation


def num_steps(run: Run, num_train: int) -> int:
    """Steps of the whole run."""
    if run.schedule.max_steps is not None:
        return run.schedule.max_steps
    return max(1, round(run.schedule.epochs * steps_per_epoch(run, num_train)))


class Trainer:
    """Trains from wherever its progress is."""

    def __init__(self, parts: Parts, folder: Path, progress: Progress) -> None:
        self.parts, self.run, self.progress = parts, parts.run, progress
        self.processes, self.objective = parts.processes, parts.objective
        self.num_steps = num_steps(parts.run, parts.corpus.num_train)
        self.optimisation = Optimisation(
            parts.objective, self.run.optimiser, self.run.schedule, self.num_steps
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", self.run.checkpoints.keep)
        self.log = StepLog(
            progress.step, self.num_steps, self.run.logging.every, is_first=parts.processes.is_first
        )
        self.curves: dict[str, Curve] = {}
        if parts.processes.is_first:
            names = ("log", "holdout")
            self.curves = {n: Curve(folder / f"{n}.csv", progress.step) for n in names}
        self._order = lru_cache(maxsize=2)(self._epoch)
        self._saved_step = progress.step
        self._stop = False

    def train(self, stop_at: int | None = None) -> None:
        """Train to the end, or to the step `stop_at`; a checkpoint is there afterwards.

        Raises:
            Interrupted: a signal came; the step was finished and a checkpoint written.
        """
        end = self.num_steps if stop_at is None else min(stop_at, self.num_steps)
        with self._signals(), self.log.bar():
            while self.progress.step < end:
                self._step()
                self._after_step(end)
                if self._asked_to_stop():
                    self._save()
                    raise Interrupted
            self._save()

    def _step(self) -> None:
        started, step = time.monotonic(), self.progress.step
        remedies, objective = self.run.remedies, self.objective
        share = falling(step, self.num_steps, remedies.anneal_share)
        objective.gates.floor = remedies.gate_floor * share
        objective.kv_only_weight = remedies.kv_only_weight * share
        batches = [self._batch(step, i) for i in range(self.run.optimiser.accumulation)]
        rows = [objective.rows(batch) for batch in batches]
        weight = sum((objective.weight(found) for found in rows), torch.zeros(()))
        total = self.processes.sum(weight).clamp(min=1e-6)
        sums = torch.zeros(3, self.objective.depth + 1, device=total.device)
        gates = torch.zeros(())
        for batch, chosen in zip(batches, rows, strict=True):
            seen = self.parts.source(batch)
            found = objective(batch, chosen, seen, total / self.processes.size)
            found["loss"].backward()
            sums[0, 0] += found["loss"].detach() / self.processes.size
            sums[1, 1:] += found["depth_loss"]
            sums[2, 1:] += torch.bincount(chosen.depth, minlength=len(sums[0]))[1:]
            sums[2, 0] += batch.num_answer_tokens
            gates = found["gates"]
        self.processes.sum(sums)
        values = {"loss": float(sums[0, 0]), **self.optimisation.step(step)}
        tokens = int(sums[2, 0])
        self.progress = Progress(step + 1, self.progress.answer_tokens + tokens)
        values["tokens_per_s"] = tokens / (time.monotonic() - started)
        self._report(values, (sums[1, 1:] / sums[2, 1:].clamp(min=1)).tolist(), gates.tolist())

    def _report(
        self, values: dict[str, float], depth_losses: list[float], gates: list[float] | float
    ) -> None:
        self.log.step(self.progress.step, values, depth_losses)
        if "log" in self.curves:
            means = gates if isinstance(gates, list) else []
            self.curves["log"].add(
                self._where()
                | values
                | {f"loss_{k}": loss for k, loss in enumerate(depth_losses, 1)}
                | {f"gate_{k}": mean for k, mean in enumerate(means, 1)}
            )

    def _where(self) -> dict[str, float]:
        epoch = self.progress.step / steps_per_epoch(self.run, self.parts.corpus.num_train)
        tokens = self.progress.answer_tokens
        return {"step": self.progress.step, "epoch": epoch, "answer_tokens": tokens}

    def _after_step(self, end: int) -> None:
        step = self.progress.step
        if step % self.run.logging.evaluate_every == 0 or step == end:
            self.look()
        if step % self.run.checkpoints.every == 0:
            self._save()

    def look(self) -> Holdout | None:
        """Evaluate on the holdout, if there is one."""
        corpus, logging = self.parts.corpus, self.run.logging
        held = range(corpus.num_train, len(corpus.texts))[: logging.holdout_sequences]
        if not held:
            return None
        found = evaluate(self.parts.whole(), self._held_batches(held), self.parts.lm_head)
        counts = torch.stack([found.reached, found.right]).to(self.processes.device)
        self.processes.sum(counts)
        found = Holdout(counts[0], counts[1])
        alphas = " ".join(f"{alpha:.3f}" for alpha in found.alphas)
        self.log.say(
            f"holdout after {self.progress.step} steps: alpha {alphas},"
            f" accept length {found.accept_length:.3f} (bonus included)"
        )
        if "holdout" in self.curves:
            alphas_by_name = {f"alpha_{k}": a for k, a in enumerate(found.alphas, 1)}
            self.curves["holdout"].add(
                self._where() | alphas_by_name | {"accept_length": found.accept_length}
            )
        return found

    def _held_batches(self, held: Sequence[int]) -> Iterator[tuple[Batch, Seen]]:
        texts, size = self.parts.corpus.texts, self.run.optimiser.batch_size
        order = sorted(held, key=lambda i: len(texts[i].tokens))[self.processes.rank : :]
        mine = order[:: self.processes.size]
        head = self.run.head
        draws = Draws(HOLDOUT_SEED, self.run.anchors.per_sequence, head.block_size)
        for start in range(0, len(mine), size):
            batch = collate(texts, mine[start : start + size], draws).to(self.processes.device)
            yield batch, self.parts.source(batch)

    def _epoch(self, epoch: int) -> list[list[int]]:
        texts = self.parts.corpus.texts[: self.parts.corpus.num_train]
        lengths = [len(text.tokens) for text in texts]
        return epoch_batches(lengths, self.run.optimiser.batch_size, f"{self.run.seed} {epoch}")

    def _batch(self, step: int, forward: int) -> Batch:
        """This process's part of a batch."""
        run, number = self.run, step * self.run.optimiser.accumulation + forward
        epoch, place = divmod(number, -(-self.parts.corpus.num_train // run.optimiser.batch_size))
        index = self._order(epoch)[place][self.processes.rank :: self.processes.size]
        refreshes = run.head.conditioning.kind == "refresh"
        draws = Draws(
            seed=f"{run.seed} {epoch}",
            per_sequence=run.anchors.per_sequence,
            block_size=run.head.block_size,
            refresh_share=run.anchors.refresh_share if refreshes else 0.0,
            branch_dropout=run.remedies.branch_dropout,
            prefix_mix=run.remedies.prefix_mix,
        )
        return collate(self.parts.corpus.texts, index, draws).to(self.processes.device)

    def _save(self) -> None:
        if self._saved_step == self.progress.step:
            return
        head, state = self.parts.whole().head, self.optimisation.state()
        if self.processes.is_first:
            path = self.checkpoints.save(head, state, self.progress)
            self.log.say(f"checkpoint {path}")
        self.processes.wait()
        self._saved_step = self.progress.step

    def _asked_to_stop(self) -> bool:
        """Whether a signal came to any process."""
        flag = torch.tensor(float(self._stop), device=self.processes.device)
        return bool(self.processes.sum(flag))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Finish the step at the first signal; a second one ends at once."""

        def on_signal(number: int, frame: Any) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True
            self.log.say("finishing this step, then a checkpoint; once more to end at once")

        before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
