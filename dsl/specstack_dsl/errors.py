"""What went wrong and where: problems with positions, and the two errors that carry them.

`SpecError`: the text is wrong. `PlanError`: the text is fine, but not with this model, device or
SGLang. Both hold every problem found, in file order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Position:
    """Where a value was written: a place in a file, or a command-line override."""

    file: str
    """File name as the user gave it, or `--set path=value`."""
    line: int = 0
    """1-based; 0 where there is no line (an override, an unreadable file)."""
    column: int = 0
    """1-based; 0 where there is none."""
    folder: str = "."
    """Folder that relative file names in the value are resolved against."""

    def __str__(self) -> str:
        if not self.line:
            return self.file
        return f"{self.file}:{self.line}:{self.column}"

    @property
    def origin(self) -> str:
        """`file:line`, the form that plans record."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def resolve(self, name: str) -> Path:
        """Return the file or folder that `name`, written at this position, means."""
        return Path(self.folder, Path(name).expanduser())


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is, which value, and what to do about it."""

    path: str
    """Dotted path of the value, for example `tree.depth`; empty for the file as a whole."""
    message: str
    position: Position
    rule: str
    """Name of the rule that found it: a function of `rules`, or `source`, `types`, `plan`."""

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.position), self.path, self.message) if part)


class ProblemsError(ValueError):
    """Base of the two errors; its text is one problem per line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        assert self.problems, "an error without a problem"
        super().__init__("\n".join(map(str, self.problems)))


class SpecError(ProblemsError):
    """The pipeline text is wrong."""


class PlanError(ProblemsError):
    """The pipeline is well formed, but cannot run with this model, device or SGLang."""


def in_file_order(problems: Iterable[Problem], files: Sequence[str] = ()) -> list[Problem]:
    """Sort by position; files in the order in which they were read, overrides last."""

    def key(problem: Problem) -> tuple[int, int, int]:
        file = problem.position.file
        rank = files.index(file) if file in files else len(files)
        return rank, problem.position.line, problem.position.column

    return sorted(problems, key=key)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known name, or nothing."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
