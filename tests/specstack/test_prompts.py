"""Reading prompts: the three forms of a line, and what is said of a bad one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from specstack.prompts import Message, Prompt, read_prompts, scan_prompts


def user(id: str, line: int, text: str) -> Prompt:
    return Prompt(id, line, (Message("user", text),))


BAD = [
    (b"{", "JSONDecodeError"),
    (b"[1]", "TypeError"),
    (b'"prompt"', "TypeError"),
    (b"null", "TypeError"),
    (b'{"text": "x"}', "KeyError('prompt')"),
    (b'{"turns": []}', "IndexError"),
    (b'{"turns": "x"}', "TypeError"),
    (b'{"prompt": 5}', "the prompt is 5"),
    (b'{"prompt": "\xff"}', "UnicodeDecodeError"),
    (b'{"prompt": "\\ud800"}', "UnicodeEncodeError"),
    (b'{"prompt": " \\n"}', "the prompt is empty"),
    (b'{"messages": []}', "do not end with the user's"),
    (b'{"messages": 5}', "TypeError"),
    (b'{"messages": [{"role": "user"}]}', "KeyError('content')"),
    (b'{"messages": [{"role": "robot", "content": "x"}]}', "the role is 'robot'"),
    (b'{"messages": [{"role": "assistant", "content": "x"}]}', "do not end with the user's"),
    (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "the prompt is ["),
]


@pytest.mark.parametrize(("line", "found"), BAD)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: bytes, found: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match="`messages`, `turns` or `prompt`") as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert found in str(error.value)


def test_a_scan_gives_the_good_lines_and_the_bad_ones(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    content = b"\n".join([b'{"prompt": "a"}', *(line for line, _ in BAD), b'{"prompt": "b"}'])
    path.write_bytes(content)
    found = scan_prompts(path)
    assert [p.text for p in found.prompts] == ["a", "b"]
    assert [bad.line for bad in found.bad_lines] == list(range(2, len(BAD) + 2))
    assert found.bad_share == len(BAD) / (len(BAD) + 2)
    assert found.sha256 == hashlib.sha256(content).hexdigest()
    assert scan_prompts(path, num=1).sha256 == found.sha256


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    assert scan_prompts(path).bad_share == 0
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(path)


def test_the_first_turn_or_the_prompt_is_read_and_lines_are_the_default_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"id": 7, "turns": ["a", "b"]}\r\n\n{"prompt": "c"}')
    assert read_prompts(path) == [user("7", 1, "a"), user("3", 3, "c")]


def test_a_chat_is_read_whole(tmp_path: Path) -> None:
    chat = [("system", "s"), ("user", "u"), ("assistant", ""), ("user", "v")]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}))
    [prompt] = read_prompts(path)
    assert prompt.messages == tuple(Message(*pair) for pair in chat)
    assert prompt.text == "v"
    assert prompt.sha256 != user("1", 1, "v").sha256


def test_characters_that_some_take_for_line_ends_stay_in_their_prompt(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\x0cfour"
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(path) == [user("1", 1, text)]


def test_lines_beyond_the_wanted_number_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\nnot json\n')
    assert len(read_prompts(path, num=1)) == 1
