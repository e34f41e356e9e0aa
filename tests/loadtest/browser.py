"""A headless Chromium for the tests of pages.

It comes from the PATH, else, for root, from Debian's package `chromium`. Setting
SPECSTACK_NO_BROWSER=1 skips the tests that need it; without it, a missing browser is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SKIP = "SPECSTACK_NO_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def executable() -> str:
    """Return the path of a browser; install it when it is missing."""
    if os.environ.get(SKIP) == "1":
        pytest.skip(f"{SKIP}=1")
    found = _found()
    if found is None and os.geteuid() == 0:
        _install("chromium")
        found = _found()
    if found is None:
        pytest.fail(f"no {' or '.join(NAMES)} on the PATH: install one, or set {SKIP}=1")
    return found


def _found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _install(package: str) -> None:
    """From Debian's packages, with package lists of our own."""
    with tempfile.TemporaryDirectory() as lists:
        os.makedirs(f"{lists}/partial")
        apt = ["apt-get", "-q", "-y", "-o", f"Dir::State::Lists={lists}"]
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = [*apt, "install", "--no-install-recommends", package]
        try:
            for command in ([*apt, "update"], install):
                subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            pytest.fail(
                f"`{package}` is neither on the PATH nor to be had from Debian's packages: install"
                f" it, or set {SKIP}=1 to leave its tests out.\n{output}"
            )


@contextmanager
def running_browser() -> Iterator[Any]:
    """Playwright's browser for the length of a block."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()
