"""Request traces: both public forms, and what is said of a file that is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from specstack.request_traces import TracedRequest, TraceFileError, read_request_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
MOONCAKE = """{"timestamp": 0, "input_length": 640, "output_length": 32, "hash_ids": [0, 7]}
{"timestamp": 2500, "input_length": 64, "output_length": 16}
"""


def written(folder: Path, name: str, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    return folder / name


def test_azure_rows_have_times_and_lengths(tmp_path: Path) -> None:
    first, second = read_request_trace(written(tmp_path, "code.csv", AZURE))
    assert second.seconds - first.seconds == pytest.approx(0.052, abs=1e-6)
    lengths = [(row.prompt_tokens, row.output_tokens) for row in (first, second)]
    assert lengths == [(4808, 10), (3180, 8)]
    assert first.prefix_blocks == ()


def test_times_do_not_depend_on_the_clocks_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the evening of 2023-11-05 New York put its clocks back."""
    rows = "2023-11-05 01:59:59.0,1,1\n2023-11-05 02:00:01.0,1,1\n"
    file = written(tmp_path, "night.csv", AZURE.splitlines()[0] + "\n" + rows)
    first, second = read_request_trace(file)
    assert second.seconds - first.seconds == 2.0


def test_mooncake_rows_are_milliseconds_and_say_which_prompts_begin_alike(tmp_path: Path) -> None:
    file = written(tmp_path, "conversation.jsonl", MOONCAKE)
    assert list(read_request_trace(file)) == [
        TracedRequest(0.0, 640, 32, (0, 7)),
        TracedRequest(2.5, 64, 16),
    ]


def test_rows_are_read_one_by_one(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", MOONCAKE + "not json\n")
    assert next(read_request_trace(file)).prompt_tokens == 640


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", AZURE + "2023-11-16 18:17:06.0,many,1\n", "a.csv:4: not an arrival: ValueError"),
        ("a.csv", AZURE + "\n\nyesterday,1,1\n", "a.csv:6: not an arrival: ValueError"),
        ("a.csv", "when,what\n1,2\n", "a.csv:2: not an arrival: KeyError('TIMESTAMP')"),
        ("a.csv", AZURE + "2023-11-16 18:17:06.0,1\n", "a.csv:4: not an arrival: TypeError"),
        ("a.csv", AZURE.encode() + b"\xff\xfe,1,1\n", "a.csv:4: not an arrival: ValueError"),
        ("a.jsonl", MOONCAKE + "{\n", "a.jsonl:3: not an arrival: JSONDecodeError"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: not an arrival: TypeError"),
        (
            "a.jsonl",
            '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
            "a.jsonl:1: not an arrival: ValueError('the timestamp is nan')",
        ),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": Infinity, "output_length": 1}\n',
            "a.jsonl:1: not an arrival: OverflowError",
        ),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 5}\n',
            "a.jsonl:1: not an arrival: TypeError",
        ),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}\n',
            "a.jsonl:1: not an arrival: ValueError('the hash ids are (-1,)')",
        ),
        (
            "a.txt",
            "",
            "a.txt: expected FILE.csv (TIMESTAMP,ContextTokens,GeneratedTokens)"
            " or FILE.jsonl (timestamp, input_length, output_length)",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    file = written(tmp_path, name, content)
    with pytest.raises(TraceFileError) as error:
        list(read_request_trace(file))
    assert str(error.value).removeprefix(f"{tmp_path}/").startswith(message)


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_request_trace(tmp_path / "none.csv"))
