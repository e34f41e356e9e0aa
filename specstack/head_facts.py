"""What planning knows of draft heads: where their files are, and their `config.json`. No torch.

A Hugging Face id that is not in the local cache has no config yet; nothing is then checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

import specstack.models
from specstack.locate import cached_config
from specstack.models.heads.config import HeadConfig
from specstack.models.heads.errors import sentences
from specstack_dsl import Pipeline, PlanError, Problem
from specstack_dsl.errors import Position
from specstack_dsl.parts import DrafterPart, HeadPart
from specstack_dsl.parts.target import PACKAGED_PREFIX, is_folder

PACKAGED_HEADS = Path(specstack.models.__file__).parent / "packaged_heads"


@dataclass(frozen=True)
class LocatedHead:
    """A head that a pipeline names."""

    place: str
    """Dotted path of the part: `drafter`, or `drafter.of.1`."""
    part: HeadPart
    path: str
    """What the drafter is given: a folder, or a Hugging Face id."""
    config: HeadConfig | None


def drafters(pipeline: Pipeline) -> Iterator[tuple[str, DrafterPart]]:
    """Yield the drafters that propose by themselves, with their dotted paths."""
    members = pipeline.drafter.members
    if members is None:
        yield "drafter", pipeline.drafter
        return
    for index, member in enumerate(members):
        yield f"drafter.of.{index}", member


def locate_heads(
    pipeline: Pipeline, environ: Mapping[str, str] = os.environ
) -> tuple[LocatedHead, ...]:
    """Find the heads without the network; raises PlanError for what is no head."""
    found, problems = [], []
    for place, part in drafters(pipeline):
        if not isinstance(part, HeadPart):
            continue
        path = f"{place}.checkpoint"
        position = pipeline.position(path)
        location, file = _locate(part.checkpoint, position, environ)
        try:
            config = None if file is None else _read(file)
            if config is not None and config.form != part.kind:
                raise _NoHead(
                    f"the head {part.checkpoint} is of form {config.form}, the drafter of kind"
                    f" {part.kind}: write kind: {config.form}"
                )
        except _NoHead as error:
            problems.append(Problem(path, str(error), position, "plan"))
        else:
            found.append(LocatedHead(place, part, location, config))
    if problems:
        raise PlanError(problems)
    return tuple(found)


def local_folder(path: str) -> str:
    """The folder of a located head; an id is downloaded unless it is in the local cache."""
    if is_folder(path):
        return path
    from huggingface_hub import snapshot_download

    return str(snapshot_download(path, allow_patterns=["config.json", "model.safetensors"]))


def head_digest(path: str) -> str | None:
    """First 12 hexadecimal digits of the SHA-256 of a head's weights; None: not in a folder."""
    weights = Path(path, "model.safetensors")
    if not weights.is_file():
        return None
    with weights.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


class _NoHead(Exception):
    """A sentence."""


def _locate(
    checkpoint: str, position: Position, environ: Mapping[str, str]
) -> tuple[str, Path | None]:
    """Return what the drafter is given and the config file to read, if it is here."""
    if checkpoint.startswith(PACKAGED_PREFIX):
        folder = PACKAGED_HEADS / checkpoint.removeprefix(PACKAGED_PREFIX)
        return str(folder), folder / "config.json"
    if is_folder(checkpoint):
        folder = Path(os.path.abspath(position.resolve(checkpoint)))
        return str(folder), folder / "config.json"
    cached = cached_config(checkpoint, "main", environ)
    return checkpoint, None if cached is None else Path(cached)


def _read(file: Path) -> HeadConfig:
    if not file.is_file():
        what = "has no config.json" if file.parent.is_dir() else "does not exist"
        raise _NoHead(f"the folder {file.parent} {what}: name a draft head's folder")
    try:
        text = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _NoHead(f"cannot read {file}: {error}") from None
    kind = text.get("model_type") if isinstance(text, dict) else None
    if kind != "specstack_head":
        raise _NoHead(f"{file} has model_type {kind!r}; a draft head has 'specstack_head'")
    try:
        return HeadConfig.model_validate(text)
    except ValidationError as error:
        raise _NoHead(f"{file} is not a head's: {'; '.join(sentences(error))}") from None
