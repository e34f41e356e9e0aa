"""Reports keep their shape in a pipe, and what they say in brackets."""

from __future__ import annotations

import io
import os
import pty

from specstack.terminal import PIPED_WIDTH, report_console


def test_a_pipe_is_as_wide_as_tables_need_and_brackets_are_text() -> None:
    file = io.StringIO()
    report_console(file).print("[bold]" + "x" * (PIPED_WIDTH - 6))
    assert file.getvalue() == "[bold]" + "x" * (PIPED_WIDTH - 6) + "\n"


def test_a_terminal_is_as_wide_as_it_is() -> None:
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    with os.fdopen(follower, "w") as terminal:
        console = report_console(terminal)
        assert console.is_terminal
        assert console.width != PIPED_WIDTH
    os.close(leader)
