"""The file of answers: what goes in comes out; torn lines, other files, full disks, two writers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specstack.prompts import Message, Prompt
from specstack.training.answer_file import InUse, LineFile, writing
from specstack.training.answers import (
    BadAnswers,
    NoAnswer,
    from_completion,
    read_answers,
    to_line,
)
from specstack.training.answers_meta import (
    Meta,
    Settings,
    SettingsDiffer,
    meta_path,
    read_meta,
    require_same,
    write_meta,
)
from specstack.training.testing import completion

PROMPT = Prompt("a", 3, (Message("system", "s"), Message("user", "one\u2028two")))
SETTINGS = Settings("m", "abc", 256, 0.0, 1.0, None, True, {"x": [1]})


def reply(**request: Any) -> Any:
    return completion({"messages": [{"content": "hé \ud800"}], **request})[1]


ANSWER = from_completion(PROMPT, reply(return_token_ids=True))


def test_an_answer_holds_the_chat_and_the_ids() -> None:
    assert [m["role"] for m in ANSWER.messages] == ["system", "user", "assistant"]
    assert (ANSWER.input_ids, ANSWER.output_ids) == ((1, 2), (3, 4, 5))
    assert (ANSWER.line, ANSWER.id, ANSWER.prompt_sha256) == (3, "a", PROMPT.sha256)
    assert (ANSWER.prompt_tokens, ANSWER.completion_tokens) == (2, 3)


def test_a_server_without_ids_and_one_that_spells_them_otherwise() -> None:
    plain = from_completion(PROMPT, reply())
    assert plain == replace(ANSWER, input_ids=None, output_ids=None)
    other = reply() | {"prompt_token_ids": [1, 2]}
    other["choices"][0]["token_ids"] = [3, 4, 5]
    assert from_completion(PROMPT, other) == ANSWER


@pytest.mark.parametrize("found", [None, [], {}, {"choices": []}, {"choices": [{"message": 5}]}])
def test_another_reply_is_no_answer(found: Any) -> None:
    with pytest.raises(NoAnswer, match="not a chat completion"):
        from_completion(PROMPT, found)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    answers = [ANSWER, replace(ANSWER, line=4, input_ids=None, output_ids=())]
    with writing(path) as file:
        assert file.answered == frozenset()
        for answer in answers:
            file.append(to_line(answer))
        assert list(read_answers(path)) == answers, "an answer is in the file at once"
    with writing(path) as file:
        assert file.answered == {3, 4}


@pytest.mark.parametrize("size", [1, 8, 20, -1])
def test_a_torn_last_line_is_dropped(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.jsonl"
    whole = to_line(ANSWER)
    path.write_bytes(whole + to_line(replace(ANSWER, line=4))[:size])
    assert list(read_answers(path)) == [ANSWER]
    with writing(path) as file:
        file.append(to_line(replace(ANSWER, line=5)))
    assert [answer.line for answer in read_answers(path)] == [3, 5]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"precious", ":1: not an answer"),
        (b'{"prompt": "x"}\n', ":1: not an answer"),
        (to_line(ANSWER) + b"\x00\x00", ":2: not an answer"),
        (to_line(ANSWER) * 2, ":2: a second answer to line 3"),
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadAnswers, match=said), writing(path):
        pytest.fail("it was opened")
    assert path.read_bytes() == content


def test_a_second_writer_is_refused_and_the_lock_goes_with_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with writing(path), pytest.raises(InUse, match=f"by process {os.getpid()}$"), writing(path):
        pytest.fail("two writers")
    with writing(path):
        pass


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[LineFile], None]:
    """Make the next line of a file find room for half of it."""
    write = os.write

    def fill(file: LineFile) -> None:
        calls: list[int] = []

        def half(descriptor: int, data: bytes) -> int:
            if descriptor != file._descriptor:
                return write(descriptor, data)
            calls.append(len(data))
            if len(calls) == 1:
                return write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", half)

    return fill


def test_a_full_disk_leaves_whole_lines(
    tmp_path: Path, full_disk: Callable[[LineFile], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    with writing(path) as file:
        file.append(to_line(ANSWER))
        full_disk(file)
        with pytest.raises(OSError, match="No space left") as error:
            file.append(to_line(replace(ANSWER, line=4)))
        assert error.value.filename == str(path)
        assert path.read_bytes() == to_line(ANSWER)
        monkeypatch.undo()
        file.append(to_line(replace(ANSWER, line=4)))
    assert [answer.line for answer in read_answers(path)] == [3, 4]


def test_the_settings_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read_meta(path) is None
    meta = Meta(SETTINGS, "p.jsonl", ({"started": "now"},))
    write_meta(path, meta)
    assert read_meta(path) == meta
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.meta.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 1, "settings": {}}'])
def test_broken_settings_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    meta_path(path).write_text(content)
    with pytest.raises(BadAnswers, match=r"a\.meta\.json: "):
        read_meta(path)


def test_other_settings_are_refused_with_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    require_same(SETTINGS, SETTINGS, path)
    require_same(SETTINGS, replace(SETTINGS, model=None), path)
    other = replace(SETTINGS, model="n", temperature=0.5, seed=1)
    with pytest.raises(SettingsDiffer) as error:
        require_same(SETTINGS, other, path)
    assert str(error.value).splitlines() == [
        f"{path} was made with other settings than this command's:",
        '  model: recorded "m", now "n"',
        "  temperature: recorded 0.0, now 0.5",
        "  seed: recorded none, now 1",
        f"use the recorded ones ({tmp_path / 'a.meta.json'}) or another file (-o)",
    ]


def test_a_request_says_what_the_settings_say() -> None:
    assert SETTINGS.request(5) == {
        "model": "m", "max_tokens": 256, "temperature": 0.0, "top_p": 1.0, "x": [1],
        "return_token_ids": True,
    }  # fmt: skip
    seeded = replace(SETTINGS, seed=10, token_ids=False, extra_body={}).request(5)
    assert seeded["seed"] == 15
    assert "return_token_ids" not in seeded
