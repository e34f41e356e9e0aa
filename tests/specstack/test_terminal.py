"""Reports keep their shape in a pipe, and what they say in brackets."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from specstack.terminal import PIPED_WIDTH, report_console


def test_a_pipe_is_as_wide_as_tables_need_and_brackets_are_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report_console().print("[bold]" + "x" * (PIPED_WIDTH - 6))
    assert capsys.readouterr().out == "[bold]" + "x" * (PIPED_WIDTH - 6) + "\n"


def test_a_terminal_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        console = report_console()
        assert console.is_terminal
        assert console.width != PIPED_WIDTH
    os.close(leader)
