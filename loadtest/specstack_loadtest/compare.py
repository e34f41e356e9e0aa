"""Runs a scenario on every side, in turns, and leaves a folder with records, numbers and a report.

Each repeat gives every side one run, beginning with another side each time, so that a machine that
is slow for a while is not slow for the same side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specstack_loadtest.folder import (
    RAW,
    SCENARIO,
    Manifest,
    is_whole,
    open_folder,
    raw_folder,
)
from specstack_loadtest.progress import Snapshot
from specstack_loadtest.report import write_report
from specstack_loadtest.runner import RunOutcome, run_once
from specstack_loadtest.sides import Side
from specstack_loadtest.summary import write_summary

Display = Callable[[str], Callable[[Snapshot], None]]
"""(title of a run) -> what is told how it goes."""


@dataclass(frozen=True)
class Comparison:
    """A scenario, the sides that it is run on, and where everything goes."""

    folder: Path
    manifest: Manifest
    files: dict[str, bytes]
    """The scenario and what it reads."""
    sides: tuple[Side, ...]
    allow_remote: bool = False

    def run(self, display: Display, say: Callable[[str], None]) -> dict[str, Any]:
        """Run what is not there yet, and write summary and report of what there is then.

        Returns:
            The summary.

        Raises:
            FolderError, ServerUnusable, RemoteRefused, click.ClickException: nothing, or no more,
                can be run; what was run before is reported nevertheless.
        """
        manifest = open_folder(self.folder, self.manifest, self.files)
        try:
            for repeat, side in turns(self.sides, manifest.repeats):
                if is_whole(self.folder, side.name, repeat):
                    say(f"{side.name}, repeat {repeat + 1}: is there, not run again")
                    continue
                title = f"{side.name}, repeat {repeat + 1} of {manifest.repeats}"
                outcome = self._run(side, repeat, title, display(title), say)
                manifest.as_of_now(self.folder).write(self.folder)
                if outcome.interrupted:
                    raise KeyboardInterrupt
        finally:
            manifest.as_of_now(self.folder).write(self.folder)
            if has_records(self.folder):
                write_summary(self.folder)
                say(f"report: {write_report(self.folder)}")
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text("utf-8"))
        return summary

    def _run(
        self,
        side: Side,
        repeat: int,
        title: str,
        on_progress: Callable[[Snapshot], None],
        say: Callable[[str], None],
    ) -> RunOutcome:
        log = self.folder / "logs" / f"{side.name}-{repeat}.log"
        log.parent.mkdir(exist_ok=True)
        if "pipeline" in side.facts:
            say(f"{title}: starting a server")
        with side.start(log) as url:
            return run_once(
                self.folder / SCENARIO,
                url,
                raw_folder(self.folder, side.name, repeat),
                num_workers=self.manifest.num_workers,
                opt_out=side.opt_out,
                model=side.model,
                allow_remote=self.allow_remote,
                on_progress=on_progress,
            )


def turns(sides: Sequence[Side], repeats: int) -> Iterator[tuple[int, Side]]:
    """(repeat, side) in the order in which they run."""
    for repeat in range(repeats):
        first = repeat % len(sides)
        for side in (*sides[first:], *sides[:first]):
            yield repeat, side


def has_records(folder: Path) -> bool:
    """Whether any run left something to report."""
    return any((folder / RAW).rglob("requests*.jsonl"))
