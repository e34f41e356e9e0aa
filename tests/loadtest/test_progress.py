"""What is shown of a run that goes on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import answer, failed
from small_scenarios import write_scenario

from specstack_loadtest.progress import Snapshot, line_of, live_display, table_of
from specstack_loadtest.scenario_file import load_scenario
from specstack_loadtest.watch import Watch

PHASES = ("1 user", "2 users")
FULL = Snapshot(14.2, 1, 0.7, 31, 1, 2, 87.6, 0.1234, 4)


def test_a_line_has_the_numbers() -> None:
    assert line_of("goodput", PHASES, FULL) == (
        "goodput: 14 s, 2 users (2 of 2), 31 done, 1 error, 2 in flight, 88 tokens/s,"
        " first token after 123 ms, budget 4"
    )


def test_what_is_not_known_is_left_out() -> None:
    before = Snapshot(-0.5, None, 0.0, 0, 0, None, None, None, None)
    assert line_of("plain", PHASES, before) == "plain: starting, 0 done, 0 errors"
    after = Snapshot(20.5, None, 1.0, 9, 2, 1, None, None, None)
    assert line_of("plain", PHASES, after) == (
        "plain: 20 s, last answers, 9 done, 2 errors, 1 in flight"
    )


def test_a_terminal_shows_the_same_on_two_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with console.capture() as captured:
        console.print(table_of("goodput", PHASES, FULL))
    text = captured.get()
    assert "goodput" in text
    assert "2 users (2 of 2)" in text
    assert "88 tokens/s" in text
    assert len(text.strip().splitlines()) == 2


def test_without_a_terminal_a_line_comes_now_and_then(tmp_path: Path) -> None:
    scenario = load_scenario(
        write_scenario(tmp_path, {"kind": "closed", "users": [1, 2]}, {"seconds": 5})
    )
    out = io.StringIO()
    with live_display(scenario, Console(file=out, width=40)) as display:
        for _ in range(20):
            display("ignored")
        report = display("goodput")
        for _ in range(20):
            report(FULL)
    assert out.getvalue().splitlines() == [line_of("goodput", PHASES, FULL)]


def test_what_is_done_of_a_number_of_conversations_counts_their_turns(tmp_path: Path) -> None:
    """The second of four fails at its first turn: no other comes."""
    path = write_scenario(
        tmp_path, {"kind": "closed", "users": 1}, {"requests": 4}, workload={"turns": 2}
    )
    watch = Watch(load_scenario(path), tmp_path)
    records = [
        answer(0.0, index=0), answer(1.0, index=0, turn=1), failed(2.0, index=1),
        answer(3.0, index=2), answer(4.0, index=2, turn=1),
        answer(5.0, index=3), answer(6.0, index=3, turn=1),
    ]  # fmt: skip
    shares = []
    with (tmp_path / "requests-0.jsonl").open("w") as file:
        for record in records:
            print(record.as_line(), file=file, flush=True)
            shares.append(watch.look(record.end_s, None).share_done)
    assert shares == pytest.approx([0.125, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0])
