"""Checkpoints of a run: folders that appear whole or not at all.

Each holds the head as `load_head` reads it and `trainer.pt` (step, tokens, the optimiser's state).
There is no random state: all randomness is a function of seed and step. A run that is killed loses
what followed its last checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specstack.models import store
from specstack.models.heads.checkpoint import Head, save_head
from specstack.training.errors import RunError

STATE = "trainer.pt"
FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    """Steps that are done."""
    answer_tokens: int = 0
    """Trained on, with repetitions."""


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(self, head: Head, optimiser: dict[str, Any], progress: Progress) -> Path:
        """Write one, then remove the oldest beyond `keep`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{progress.step:08d}"
        with store.work_folder(self.folder / ".work") as work:
            folder = work / "checkpoint"
            save_head(head, folder)
            state = {
                "format": FORMAT,
                "step": progress.step,
                "answer_tokens": progress.answer_tokens,
                "optimiser": optimiser,
            }
            torch.save(state, folder / STATE)
            store.write_manifest(folder, {"step": progress.step})
            store.publish(folder, path, aside=work / "previous")
        for old in self._paths()[: -self.keep]:
            shutil.rmtree(old)
        return path

    def latest(self, echo: Callable[[str], None]) -> Path | None:
        """The last whole checkpoint; None if there is none at all.

        Raises:
            RunError: all are damaged.
        """
        paths = self._paths()
        for path in reversed(paths):
            problems = store.problems_of(path, rehash=True)
            if not problems:
                return path
            echo(f"checkpoint {path} is damaged ({'; '.join(problems)}): not used")
        if paths:
            raise RunError(f"every checkpoint in {self.folder} is damaged: remove them to restart")
        return None

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def read_state(path: Path) -> tuple[Progress, dict[str, Any]]:
    """What `trainer.pt` of a checkpoint holds beside the head: progress, the optimiser's state."""
    state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    if state["format"] != FORMAT:
        raise RunError(f"{path / STATE} has format {state['format']}, this version reads {FORMAT}")
    return Progress(state["step"], state["answer_tokens"]), state["optimiser"]
