"""Preparing a model while processes are killed, interrupted or in each other's way.

Every test starts real processes; a file tells when one has reached the middle of the conversion,
another lets it go on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from specstack.models import store, testing
from specstack.models.packaged import CATALOGUE, ensure, local_path, state_of

LIMIT_S = 60

CHILD = """
import json, os, signal, sys, time
from pathlib import Path
from specstack.models import catalogue
catalogue.CATALOGUE["tiny"] = catalogue.PackagedModel(**json.loads(os.environ["TINY_MODEL"]))
signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("STOP_AT"):
    from specstack.models import gguf
    write = gguf.write_safetensors
    def stop_first(path, tensors, **rest):
        path.write_bytes(b"half of it")
        Path(os.environ["STOP_AT"], "reached").touch()
        while not Path(os.environ["STOP_AT"], "go").exists():
            time.sleep(0.01)
        write(path, tensors, **rest)
    gguf.write_safetensors = stop_first
from specstack.models.cli import models
models(["get", "tiny"])
"""

FAKE_PIP = """
import os, sys, time
from pathlib import Path
target = Path(os.environ["STOP_AT"], "pid")
target.with_suffix(".new").write_text(str(os.getpid()))
target.with_suffix(".new").rename(target)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Child]]:
    """Start `specstack models get tiny` in a process of its own, with an empty cache."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    wheels = tmp_path / "wheels"
    monkeypatch.setitem(CATALOGUE, testing.NAME, testing.write_wheel(wheels))
    monkeypatch.setenv("TINY_MODEL", json.dumps(dataclasses.asdict(CATALOGUE["tiny"])))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("SPECSTACK_CACHE", str(tmp_path / "cache"))
    children: list[Child] = []

    def start_child(**env: str) -> Child:
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", CHILD],
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return children[-1]

    yield start_child
    for child in children:
        child.kill()
        child.communicate()


Child = subprocess.Popen[str]


def wait_for(path: Path, child: Child) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def finish(child: Child) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=LIMIT_S)
    return child.returncode, out.strip(), err.strip()


def left_behind() -> list[str]:
    return sorted(p.name for p in local_path("tiny").parent.iterdir() if p.name != ".lock")


def test_killed_in_the_middle_shows_no_folder_and_the_next_call_succeeds(
    start: Callable[..., Child], tmp_path: Path
) -> None:
    child = start(STOP_AT=str(tmp_path))
    wait_for(tmp_path / "reached", child)
    child.kill()
    assert finish(child)[0] == -signal.SIGKILL
    assert not local_path("tiny").exists()
    assert state_of("tiny").state == "not downloaded"
    assert left_behind() == [f".{local_path('tiny').name}.work"], "the kill came too late"

    path = ensure("tiny")
    assert state_of("tiny", rehash=True).state == "ready"
    assert left_behind() == [path.name]


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted: nothing partial was kept"),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_stopped_while_converting_leaves_nothing(
    start: Callable[..., Child], tmp_path: Path, sent: signal.Signals, code: int, said: str
) -> None:
    child = start(STOP_AT=str(tmp_path))
    wait_for(tmp_path / "reached", child)
    child.send_signal(sent)
    assert finish(child) == (code, "", said)
    assert left_behind() == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_downloading_ends_pip_and_leaves_nothing(
    start: Callable[..., Child], tmp_path: Path, sent: signal.Signals
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(FAKE_PIP)
    child = start(STOP_AT=str(tmp_path), PYTHONPATH=str(tmp_path))
    wait_for(tmp_path / "pid", child)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)
    child.send_signal(sent)
    assert finish(child)[0] == 128 + sent
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert left_behind() == []


def test_second_process_waits_and_uses_what_the_first_has_made(
    start: Callable[..., Child], tmp_path: Path
) -> None:
    first = start(STOP_AT=str(tmp_path))
    wait_for(tmp_path / "reached", first)
    second = start(PIP_FIND_LINKS=str(tmp_path / "nothing"))
    assert second.stderr is not None
    said = second.stderr.readline()
    assert said == f"waiting for process {first.pid}, which is preparing tiny\n"
    (tmp_path / "go").touch()
    path = str(local_path("tiny"))
    assert finish(first) == (0, path, "")
    assert finish(second) == (0, path, ""), "it has no index: it can only have used the first's"
    assert state_of("tiny", rehash=True).state == "ready"


def test_a_wait_can_be_interrupted(start: Callable[..., Child]) -> None:
    folder = local_path("tiny").parent
    folder.mkdir(parents=True)
    with store.locked(folder / ".lock", on_wait=lambda pid: pytest.fail("nobody else is here")):
        child = start()
        assert child.stderr is not None
        assert child.stderr.readline().startswith(f"waiting for process {os.getpid()}")
        child.send_signal(signal.SIGINT)
        assert finish(child)[0] == 130
    assert left_behind() == []


def test_a_failed_holder_passes_the_lock_on(tmp_path: Path) -> None:
    def refuse(pid: str) -> None:
        pytest.fail("the lock is free")

    with (
        pytest.raises(RuntimeError, match="the holder failed"),
        store.locked(tmp_path / "lock", on_wait=refuse),
    ):
        raise RuntimeError("the holder failed")
    with store.locked(tmp_path / "lock", on_wait=refuse):
        pass


def test_planning_imports_neither_torch_nor_numpy_nor_gguf() -> None:
    code = (
        "import sys; from specstack.models.packaged import CATALOGUE, local_path, state_of\n"
        "for name in CATALOGUE: state_of(name)\n"
        "print(sorted({'torch', 'numpy', 'gguf', 'rich', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_preparing_imports_no_torch(start: Callable[..., Child]) -> None:
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n{CHILD}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == [str(local_path("tiny")), "False"], result.stderr
