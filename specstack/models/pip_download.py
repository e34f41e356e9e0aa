"""One wheel by its hash, through the user's own pip: its index, proxies, cache and certificates.

pip verifies the hash before it hands the file over. Nothing is installed or imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from specstack.models.errors import ModelError

_POLL_S = 0.1
_UNREACHABLE = re.compile(
    r"Retrying \(|Connection|Timeout|timed out|ProxyError|SSLError|Name or service not known"
    r"|Temporary failure in name resolution|Could not fetch URL|HTTP error"
)


def download_wheel(
    requirement: str, sha256: str, work: Path, *, on_bytes: Callable[[int], None]
) -> Path:
    """Download the wheel of `requirement` ("name==version") into `work`; return its path.

    Temporary files of pip stay inside `work`; a pip that still runs when this is left is ended.

    Args:
        on_bytes: called several times a second with the bytes that have arrived.

    Raises:
        ModelError: pip is missing or has failed; the message says why.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip, which downloads {requirement}",
            f"{sys.executable} -m ensurepip",
        )
    wheels, temporary, log = work / "wheels", work / "tmp", work / "pip.log"
    temporary.mkdir()
    requirements = work / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-input", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--dest", str(wheels), "--requirement", str(requirements)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        code = _wait(process, lambda: on_bytes(_largest_file(work)))
    if code:
        raise _explain(requirement, code, log.read_text(encoding="utf-8", errors="replace"))
    (wheel,) = wheels.iterdir()
    return wheel


def _wait(process: subprocess.Popen[bytes], poll: Callable[[], None]) -> int:
    try:
        while True:
            try:
                return process.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                poll()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _largest_file(folder: Path) -> int:
    """Size of the file that is growing, wherever this version of pip puts it."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip moved it between the listing and here
                continue
    return max(sizes)


def _explain(requirement: str, code: int, log: str) -> ModelError:
    """Turn the output of a failed pip into what happened and what to do about it."""
    errors = [line.strip() for line in log.splitlines() if "ERROR:" in line]
    said = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {code}"
    if "DO NOT MATCH THE HASHES" in log:
        return ModelError(
            f"{requirement}: the package index offers another file than the pinned one "
            "(SHA-256 differs)",
            "a mirror or proxy may alter files; try another index (pip config list shows yours)",
        )
    if "[Errno 28]" in log or "No space left on device" in log:
        return ModelError(
            f"{requirement}: no space left on the disk while pip downloaded it",
            "free some space, or set SPECSTACK_CACHE (and PIP_CACHE_DIR) to a larger disk",
        )
    if _UNREACHABLE.search(log):
        return ModelError(
            f"{requirement}: no package index can be reached (pip: {said})",
            "check the network and the proxy settings; pip config list shows what pip uses",
        )
    if "No matching distribution found" in log:
        return ModelError(
            f"{requirement}: not found on the package index that pip is configured to use",
            "pip config list shows the index; a mirror may not carry this package",
        )
    return ModelError(f"{requirement}: pip download failed (pip: {said})", "")
