"""Where the target's files are on this machine. No network: a download is for serving."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specstack.models.packaged import CATALOGUE, local_path
from specstack_dsl import Pipeline, PlanError, Problem
from specstack_dsl.errors import did_you_mean
from specstack_dsl.parts.target import PACKAGED_PREFIX, is_folder


@dataclass(frozen=True)
class TargetLocation:
    """Where the target's files are."""

    path: str
    """What SGLang is given: a folder, or a Hugging Face id."""
    note: str
    """How it was found."""
    config_file: str | None = None
    """Local `config.json`, if there is one."""
    config: dict[str, Any] | None = None
    """The config of a packaged model, known without its files."""


def refuse_target(pipeline: Pipeline, message: str) -> PlanError:
    """Return the error that a target cannot be used, at its place in the text."""
    place = pipeline.position("target.model")
    return PlanError([Problem("target.model", message, place, "plan")])


def locate_target(pipeline: Pipeline, environ: Mapping[str, str] = os.environ) -> TargetLocation:
    """Find the target without the network; raises PlanError for a name that nothing has."""
    model = pipeline.target.model
    if model.startswith(PACKAGED_PREFIX):
        return _packaged(pipeline, model.removeprefix(PACKAGED_PREFIX))
    if is_folder(model):
        folder = Path(os.path.abspath(pipeline.position("target.model").resolve(model)))
        if not (folder / "config.json").is_file():
            what = "has no config.json" if folder.is_dir() else "does not exist"
            raise refuse_target(pipeline, f"the folder {folder} {what}: name a model's folder")
        return TargetLocation(
            path=str(folder), config_file=str(folder / "config.json"), note="local folder"
        )
    cached = cached_config(model, str(pipeline.engine.args.get("revision", "main")), environ)
    note = "Hugging Face id, in the local cache"
    if cached is None:
        note = "Hugging Face id, not in the local cache: its config is unknown until downloaded"
    return TargetLocation(path=model, config_file=cached, note=note)


def _packaged(pipeline: Pipeline, name: str) -> TargetLocation:
    if name not in CATALOGUE:
        known = ", ".join(sorted(CATALOGUE))
        hint = did_you_mean(name, CATALOGUE)
        raise refuse_target(pipeline, f"no packaged model {name!r}: there are {known}{hint}")
    return TargetLocation(
        path=str(local_path(name)),
        config=dict(CATALOGUE[name].config),
        note="packaged model",
    )


def cached_config(model: str, revision: str, environ: Mapping[str, str]) -> str | None:
    """Return the `config.json` of a model in the Hugging Face cache."""
    home = environ.get("HF_HOME") or os.path.join(
        environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    repository = hub / f"models--{model.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    config = repository / "snapshots" / commit / "config.json"
    return str(config) if config.is_file() else None
