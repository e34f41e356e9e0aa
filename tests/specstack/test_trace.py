"""Traces keep every number of a round, no text, and no more bytes than they may."""

from __future__ import annotations

import dataclasses
import json
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.metrics import trace
from specstack.metrics.record import RoundRecord
from specstack.metrics.trace import TraceError, TraceWriter, read_trace

HEADER = {"plan": "abc123", "choices": [0, 3]}


@st.composite
def records(draw):
    rows = draw(st.integers(1, 5))
    offered = draw(st.integers(0, 6))
    some = st.integers(0, 300)
    of_rows = st.lists(some, min_size=rows, max_size=rows).map(tuple)
    seconds = st.floats(0, 3)
    of_drafts = st.lists(st.floats(0, 1), min_size=offered, max_size=offered)
    offers = draw(st.lists(of_drafts, min_size=rows, max_size=rows))
    survivals = np.array(offers, dtype=np.float32).reshape(rows, offered)
    picked = [draw(st.sets(st.integers(1, max(offered, 1)), max_size=offered)) for _ in range(rows)]
    ranks = np.zeros((rows, offered), dtype=np.int64)
    for row, places in zip(ranks, picked, strict=True):
        row[: len(places)] = sorted(places)
    return RoundRecord(
        num_requests=rows, num_opted_out=draw(some), num_drafting=draw(some),
        draft_budget=offered, reason=draw(st.sampled_from(["goodput", "hold"])),
        num_draft_tokens=draw(some), nodes_per_depth=tuple(draw(st.lists(some, max_size=4))),
        draft_seconds=draw(seconds), build_seconds=draw(seconds), verify_seconds=draw(seconds),
        accept_seconds=draw(seconds), num_correct=draw(of_rows),
        drafts_per_drafter=tuple(draw(st.lists(some, max_size=2))),
        correct_per_drafter=tuple(draw(st.lists(some, max_size=2))),
        min_survival=draw(st.sampled_from([0.0, 0.02, 0.5])), num_drafts=draw(of_rows),
        survivals=-np.sort(-survivals, axis=1), accept_ranks=ranks,
        request_ids=tuple(draw(st.lists(st.sampled_from("abcdefgh"), min_size=rows, max_size=rows,
                                        unique=True))),
        context_lens=draw(of_rows), num_queued=draw(some), kv_usage=draw(st.floats(0, 1)),
        started_at=draw(st.floats(1.7e9, 1.9e9)), step_seconds=draw(st.none() | seconds),
    )  # fmt: skip


A_RECORD = RoundRecord(
    num_requests=2, num_opted_out=0, num_drafting=2, draft_budget=3, reason="goodput",
    num_draft_tokens=4, nodes_per_depth=(2, 2), draft_seconds=0.001, build_seconds=0.0,
    verify_seconds=0.02, accept_seconds=0.001, num_correct=(1, 0), num_drafts=(3, 1),
    survivals=np.array([[0.9, 0.5, 0.25], [0.125, 0, 0]], dtype=np.float32),
    accept_ranks=np.array([[2, 0], [0, 0]]), request_ids=("chat-of-alice", "chat-of-bob"),
    context_lens=(17, 900), started_at=1.8e9, step_seconds=0.025,
)  # fmt: skip


def a_record(**changes):
    return dataclasses.replace(A_RECORD, **changes)


def written(folder, rounds, **limits):
    with TraceWriter(folder, HEADER, **limits) as writer:
        for record in rounds:
            writer.write(record)
    header, kept = read_trace(folder)
    return header, list(kept)


def assert_close(kept, record, names):
    for field in dataclasses.fields(RoundRecord):
        one, other = getattr(kept, field.name), getattr(record, field.name)
        if field.name == "survivals":
            np.testing.assert_allclose(one, other, atol=0.000501)
            assert one.dtype == np.float32
        elif field.name == "accept_ranks":
            np.testing.assert_array_equal(one, other)
        elif field.name == "request_ids":
            assert one == tuple(names.setdefault(name, str(len(names))) for name in other)
        elif field.name.endswith("_seconds") or field.name == "started_at":
            assert one == (None if other is None else pytest.approx(other, abs=1e-6))
        elif field.name == "kv_usage":
            assert one == pytest.approx(other, abs=5.1e-5)
        else:
            assert one == other, field.name


@settings(deadline=None, max_examples=60)
@given(rounds=st.lists(records(), min_size=1, max_size=5))
def test_every_field_of_a_round_comes_back(rounds):
    with tempfile.TemporaryDirectory() as folder:
        header, kept = written(folder, rounds)
    assert header.items() >= HEADER.items()
    names = {}
    assert len(kept) == len(rounds)
    for one, record in zip(kept, rounds, strict=True):
        assert_close(one, record, names)


def test_a_field_that_a_trace_forgot_would_be_seen():
    known = {*trace._PLAIN, *trace._SECONDS, "survivals", "accept_ranks", "request_ids"}
    assert known == {field.name for field in dataclasses.fields(RoundRecord)}
    with pytest.raises(AssertionError, match="num_queued"):
        assert_close(a_record(request_ids=()), a_record(request_ids=(), num_queued=1), {})


def test_nothing_of_a_request_but_numbers_is_written(tmp_path):
    written(tmp_path, [a_record(), a_record()])
    (file,) = tmp_path.iterdir()
    lines = file.read_text().splitlines()
    assert "alice" not in file.read_text()
    for line in map(json.loads, lines[1:]):
        assert [key for key, value in line.items() if "'" in repr(value)] == ["r"]
        assert line["i"] == [0, 1]
    assert lines[1].count("alice") == 0
    assert "alice" in repr(a_record())  # the round itself does name its requests


def test_requests_are_numbered_as_they_appear_and_forgotten_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "REMEMBERED_REQUESTS", 2)
    pairs = [("a", "b"), ("c", "b"), ("a", "b")]
    _, kept = written(tmp_path, [a_record(request_ids=pair) for pair in pairs])
    assert [record.request_ids for record in kept] == [("0", "1"), ("2", "1"), ("3", "1")]


@pytest.mark.parametrize("num_files", [2, 4])
def test_files_never_take_more_than_they_may_and_the_newest_rounds_stay(tmp_path, num_files):
    limit, rounds = 8000, [a_record(num_queued=number) for number in range(200)]
    with TraceWriter(tmp_path, HEADER, max_bytes=limit, num_files=num_files) as writer:
        for record in rounds:
            writer.write(record)
            files = list(tmp_path.iterdir())
            assert sum(file.stat().st_size for file in files) <= limit
            assert len(files) <= num_files
    _, kept = read_trace(tmp_path)
    numbers = [record.num_queued for record in kept]
    assert numbers == list(range(200 - len(numbers), 200))
    assert sum(file.stat().st_size for file in files) > limit / 3


def test_without_rotation_the_limit_would_be_passed(tmp_path):
    written(tmp_path, [a_record()] * 200)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 8000


def test_a_last_line_that_was_cut_short_is_left_out_with_a_warning(tmp_path, caplog):
    written(tmp_path, [a_record()] * 3)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    _, kept = read_trace(file)
    assert len(list(kept)) == 2
    assert f"{file}:4: cut short, left out" in caplog.text


def test_a_line_broken_in_the_middle_is_an_error(tmp_path):
    written(tmp_path, [a_record()] * 3)
    (file,) = tmp_path.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2][:-20] + b"\n", lines[3]]))
    with pytest.raises(TraceError, match=r"rounds-000001\.jsonl:3: not a round: "):
        list(read_trace(file)[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1: not a trace of rounds: "),
        ("[1]\n", ":1: not a trace of rounds: the header lacks 'specstack_trace'"),
        ('{"specstack_trace": 9}\n', ":1: a trace of version 9; this specstack reads 1"),
        (None, ": No such file or directory"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path, content, message):
    file = tmp_path / "rounds.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(TraceError) as error:
        read_trace(file)
    assert str(error.value).startswith(f"{file}{message}")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"no file rounds-\*\.jsonl in this folder"):
        read_trace(tmp_path)


def test_a_folder_answers_with_its_newest_run(tmp_path, caplog):
    written(tmp_path, [a_record()] * 3)
    _, kept = written(tmp_path, [a_record(num_queued=7)])
    assert [record.num_queued for record in kept] == [7]
    assert "files before rounds-000002.jsonl are of earlier runs" in caplog.text


def test_serving_goes_on_when_the_folder_fails(tmp_path, caplog, monkeypatch):
    writer = TraceWriter(tmp_path, HEADER, max_bytes=4000, num_files=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_open_next", full)
    for _ in range(50):
        writer.write(a_record())
    assert not writer.recording
    assert caplog.text.count("rounds are recorded no more: [Errno 28] No space left") == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_bytes": 200}, "max_bytes 200 in 4 files is too small for headers of"),
        ({"num_files": 1}, "num_files must be at least 2 to replace one at a time: 1"),
    ],
)
def test_limits_that_leave_no_room_are_refused(tmp_path, limits, message):
    with pytest.raises(ValueError, match=message):
        TraceWriter(tmp_path, HEADER, **limits)


def test_a_round_larger_than_a_file_is_left_out_with_a_warning(tmp_path, caplog):
    _, kept = written(tmp_path, [a_record(nodes_per_depth=(1,) * 999), a_record()],
                      max_bytes=4000, num_files=4)  # fmt: skip
    assert len(kept) == 1
    assert "fits into no file" in caplog.text
