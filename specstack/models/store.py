"""Folders that appear whole or not at all: work folder, manifest, atomic rename, lock.

Knows nothing about models. A folder is published by one rename after everything in it has reached
the disk; its manifest, written last, holds the size and the SHA-256 of every other file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Describe the files of `folder` and bring all of it to the disk. `facts` are kept as given."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({**facts, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def problems_of(folder: Path, *, rehash: bool = False) -> list[str]:
    """Return what is wrong with a published folder, one line per file; empty if it is whole.

    Sizes are always compared; contents only with `rehash`, which reads every byte.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(k): (int(v["bytes"]), str(v["sha256"])) for k, v in manifest["files"].items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except OSError as error:
        return [f"{MANIFEST} cannot be read: {error.strerror}"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read as a manifest"]
    problems = [_problem(folder / name, *expected, rehash) for name, expected in files.items()]
    return [problem for problem in problems if problem]


def _problem(path: Path, size: int, sha256: str, rehash: bool) -> str:
    try:
        found = path.stat().st_size
        if found != size:
            return f"{path.name} has {found:,} bytes instead of {size:,}"
        if rehash and sha256_of(path) != sha256:
            return f"{path.name} has other contents than when it was written (SHA-256 differs)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return ""


@contextmanager
def locked(path: Path, *, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`; `on_wait` gets the holder's process id before a wait begins.

    The lock goes with the process that holds it, so a killed one leaves nothing to clear.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def work_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder at `path` and remove it afterwards, whatever happens.

    The caller holds a lock: what is found there was left by a process that was killed.
    """
    try:
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(folder: Path, path: Path, *, aside: Path) -> None:
    """Move `folder` to `path` in one step; a folder that is there moves to `aside` first.

    A crash between the two moves leaves nothing at `path`, never a mixture.
    """
    if path.exists():
        os.rename(path, aside)
    os.rename(folder, path)
    _sync(path.parent)
