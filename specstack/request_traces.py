"""Recorded traffic: when requests came and how long they were, of the traces that are public.

Azure LLM inference traces are CSV (TIMESTAMP, ContextTokens, GeneratedTokens;
github.com/Azure/AzurePublicDataset). Mooncake traces are JSON Lines (timestamp in milliseconds,
input_length, output_length, hash_ids; github.com/kvcache-ai/Mooncake). No torch.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FORMS = {
    ".csv": "FILE.csv (TIMESTAMP,ContextTokens,GeneratedTokens)",
    ".jsonl": "FILE.jsonl (timestamp, input_length, output_length)",
}
"""What is read, by the end of the file's name."""
PREFIX_BLOCK_TOKENS = 512
"""Tokens of a prompt that one of Mooncake's hash ids stands for."""


class TraceFileError(ValueError):
    """A file is no request trace; names file and line."""


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace."""

    seconds: float
    """When it came; since when is the file's own matter."""
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of tokens, in order; prompts that begin with the same ids begin
    with the same text. Empty where the trace does not say."""


def read_request_trace(path: Path) -> Iterator[TracedRequest]:
    """Yield the requests of a trace, in the order of the file.

    Raises:
        TraceFileError: the file's name, or a line, is of no known form.
        OSError: it cannot be read.
    """
    if path.suffix not in FORMS:
        raise TraceFileError(f"{path}: expected {' or '.join(FORMS.values())}")
    return _READERS[path.suffix](path)


def _azure(path: Path) -> Iterator[TracedRequest]:
    # Bytes that are no text become characters that are no number.
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.DictReader(file)
        for row in rows:
            try:
                yield _azure_request(row)
            except _NOT_A_REQUEST as error:
                raise _bad_line(path, rows.line_num, error) from error


def _azure_request(row: dict[str, str]) -> TracedRequest:
    when = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
    return TracedRequest(when.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(path: Path) -> Iterator[TracedRequest]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _mooncake_request(json.loads(line))
            except _NOT_A_REQUEST as error:
                raise _bad_line(path, number, error) from error


def _mooncake_request(row: Any) -> TracedRequest:
    seconds = row["timestamp"] / 1000
    if not math.isfinite(seconds):
        raise ValueError(f"the timestamp is {row['timestamp']}")
    blocks = tuple(int(block) for block in row.get("hash_ids", ()))
    if min(blocks, default=0) < 0:
        raise ValueError(f"the hash ids are {blocks}")
    return TracedRequest(seconds, int(row["input_length"]), int(row["output_length"]), blocks)


_NOT_A_REQUEST = (KeyError, TypeError, ValueError, OverflowError)


def _bad_line(path: Path, number: int, error: Exception) -> TraceFileError:
    return TraceFileError(f"{path}:{number}: not an arrival: {error!r}")


_READERS: dict[str, Callable[[Path], Iterator[TracedRequest]]] = {
    ".csv": _azure,
    ".jsonl": _mooncake,
}
