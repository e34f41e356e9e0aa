"""The folder of a comparison: its manifest, where each run's raw files lie, and their hashes.

A folder can be gone on with: runs that are whole are kept, as long as scenario and sides are the
same. `manifest.json` is written before the first run and after every one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from specstack.budget.cost_store import machine_name
from specstack_loadtest.scenario import Scenario, Trace

MANIFEST, SCENARIO, INPUTS, RAW = "manifest.json", "scenario.yaml", "inputs", "raw"
KILLED = "it was killed"
"""Why a run ended that could not say so itself."""
_PACKAGES = ("specstack", "locust", "httpx", "gevent", "numpy")
SAME = (
    "kind", "scenario", "sides", "baseline", "side_facts", "num_workers", "machine", "commit",
    "versions",
)  # fmt: skip
"""What must be equal to go on with a folder: runs of one side are taken together."""


class FolderError(Exception):
    """A folder cannot be used; says which and why."""


@dataclass(frozen=True)
class Manifest:
    """What was run, with what, and what it left."""

    kind: str
    """`run` or `compare`."""
    scenario: dict[str, str]
    """name, file, sha256 of everything it reads."""
    sides: tuple[str, ...]
    baseline: str | None
    repeats: int
    side_facts: dict[str, dict[str, Any]]
    num_workers: int
    command: str
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat("T", "seconds"))
    versions: dict[str, str | None] = field(default_factory=lambda: _versions())
    commit: str | None = field(default_factory=lambda: _commit())
    machine: str = field(default_factory=machine_name)
    files: dict[str, str] = field(default_factory=dict)
    """sha256 of the scenario, its inputs and every raw file, by the path in the folder."""
    incomplete: tuple[str, ...] = ()
    """Runs that ended early, with the reason."""
    version: int = 1

    def write(self, folder: Path) -> None:
        """Write it in one step, so that a killed process leaves the old one."""
        target = folder / MANIFEST
        part = target.with_suffix(".part")
        part.write_text(json.dumps(vars(self), indent=2, ensure_ascii=False) + "\n", "utf-8")
        part.replace(target)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's.

        Raises:
            FolderError: there is none, or it is none.
        """
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_text("utf-8"))
            if not all(map(is_name, data["sides"])):
                raise ValueError(f"sides that name no folder: {data['sides']}")
            return cls(**data | {name: tuple(data[name]) for name in ("sides", "incomplete")})
        except OSError as error:
            raise FolderError(f"{path}: {error.strerror}: not a folder of load tests") from None
        except (ValueError, TypeError, LookupError) as error:
            raise FolderError(f"{path}: not a manifest of load tests: {error}") from None

    def as_of_now(self, folder: Path) -> Manifest:
        """The same, with hashes of what lies there now, and which runs of it ended early."""
        inputs = [folder / SCENARIO, *(folder / INPUTS).iterdir()]
        paths = sorted([*inputs, *(path for path in (folder / RAW).rglob("*") if path.is_file())])
        files = {str(path.relative_to(folder)): sha256_of(path) for path in paths}
        early = tuple(f"{run}: {why}" for run, why in self._ended_early(folder).items())
        return replace(self, files=files, incomplete=early)

    def with_killed_runs(self, folder: Path) -> Manifest:
        """The same, with what runs that were killed left: nobody was there to write it down. What
        is known of the others stays.
        """
        early, now = self._ended_early(folder), self.as_of_now(folder)
        killed = tuple(f"{RAW}/{run}/" for run, why in early.items() if why == KILLED)
        files = {name: old for name, old in self.files.items() if not name.startswith(killed)}
        files |= {name: new for name, new in now.files.items() if name.startswith(killed)}
        return replace(now, files=dict(sorted(files.items())))

    def _ended_early(self, folder: Path) -> dict[str, str]:
        """Why runs that were begun are not complete, by SIDE/REPEAT."""
        runs = [(side, repeat) for side in self.sides for repeat in range(self.repeats)]
        return {f"{s}/{r}": why for s, r in runs if (why := _why_early(folder, s, r))}


def is_name(text: str) -> bool:
    """Whether it can name a side, and so a folder."""
    return bool(text) and not text.startswith(".") and not set(text) & set("/\\\0")


def raw_folder(folder: Path, side: str, repeat: int) -> Path:
    """Where one run of one side leaves its files."""
    return folder / RAW / side / str(repeat)


def _why_early(folder: Path, side: str, repeat: int) -> str:
    """Why a run that was begun is not complete; else empty."""
    raw = raw_folder(folder, side, repeat)
    if not raw.exists():
        return ""
    try:
        outcome = json.loads((raw / "run.json").read_text("utf-8"))
        return "" if outcome["complete"] else str(outcome["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return KILLED


def is_whole(folder: Path, side: str, repeat: int) -> bool:
    """Whether a run is there, ended as it should, and no request of it failed."""
    path = raw_folder(folder, side, repeat) / "run.json"
    try:
        outcome = json.loads(path.read_text("utf-8"))
        return bool(outcome["complete"]) and not outcome["num_errors"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def freeze(scenario: Scenario) -> dict[str, bytes]:
    """The scenario and all that it reads, as files of a folder: contents by path.

    What is measured is read from there, so that a folder stays whole when the scenario changes.
    """
    files: dict[str, bytes] = {}

    def keep(name: str) -> str:
        path = scenario.resolve(name)
        kept = f"{INPUTS}/{path.name}"
        while kept in files:
            kept = f"{INPUTS}/{len(files)}-{path.name}"
        files[kept] = path.read_bytes()
        return kept

    data = scenario.model_dump(mode="json", exclude_none=True)
    data["workload"]["prompts"] = [keep(name) for name in scenario.workload.prompts]
    if isinstance(scenario.arrivals, Trace):
        data["arrivals"]["file"] = keep(scenario.arrivals.file)
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return {SCENARIO: text.encode(), **files}


def digest(files: Mapping[str, bytes]) -> str:
    """sha256 of contents and names."""
    made = hashlib.sha256()
    for name, content in sorted(files.items()):
        made.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return made.hexdigest()


def open_folder(folder: Path, manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
    """Make `folder` with the scenario's files, or go on with it.

    Returns:
        The manifest, with what is known of the runs that are there. No repeat that was begun is
        left out, however few are asked for now.

    Raises:
        FolderError: another comparison lies there.
    """
    if (folder / MANIFEST).exists():
        before = Manifest.read(folder)
        for name in SAME:
            old, new = (json.loads(json.dumps(getattr(one, name))) for one in (before, manifest))
            if old != new:
                raise FolderError(
                    f"{folder} holds runs with another {name.replace('_', ' ')}:\n"
                    f"  there: {json.dumps(old)}\n  asked: {json.dumps(new)}\n"
                    "give another --out, or remove that folder"
                )
        begun = [
            repeat + 1
            for repeat in range(before.repeats)
            if any(raw_folder(folder, side, repeat).exists() for side in before.sides)
        ]
        manifest = replace(
            manifest,
            repeats=max([manifest.repeats, *begun]),
            created_at=before.created_at,
            files=before.files,
            incomplete=before.incomplete,
        )
    elif folder.exists() and any(folder.iterdir()):
        raise FolderError(f"{folder} is not empty and holds no load test: give another --out")
    (folder / INPUTS).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    manifest.write(folder)
    return manifest


def sha256_of(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str | None]:
    found: Mapping[str, str | None] = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **found}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the source that runs, with a mark when it was changed; None outside its repository: an
    installed package may lie within somebody else's."""
    file = Path(__file__)
    try:
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    asked = ["git", "-C", str(folder), *words]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10)
    return found.stdout.strip()
