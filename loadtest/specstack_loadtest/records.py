"""What a run leaves per request: one JSON line each, from which every number of a report follows.

Times are seconds since the run's epoch, the moment at which its load began.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

CANCELLED = "cancelled"
"""Kind of the error of a request that the client gave up because the run was stopped."""


@dataclass(frozen=True)
class RequestRecord:
    """One turn of one conversation: when it was due, what came back when, and how it ended."""

    phase: int
    index: int
    """Of the conversation within its phase, counted from 0; the same on every side."""
    turn: int
    """Within the conversation, counted from 0."""
    worker: int
    warmup: bool
    """Due before the measured part of its phase."""
    due_s: float
    """When the arrival process wanted it sent. In a closed loop, and for a turn that waits for the
    answer before it, when its user was free. Latencies count from here."""
    sent_s: float
    chunk_s: tuple[float, ...]
    """When each chunk with text arrived."""
    chunk_tokens: tuple[int, ...]
    """Tokens of the answer so far, after each of these chunks; empty if the server does not say."""
    end_s: float
    """When the answer, or the error, was complete."""
    error: str | None
    """Its kind, for example `connect` or `http_503`; None: the answer is whole."""
    detail: str
    """The error in words, cut to 200 characters; else empty."""
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    """Of the prompt's, those that the prefix cache held; None: the server does not say."""
    output_tokens: int | None
    max_tokens: int
    temperature: float
    text_sha256: str
    """Of the answer's text."""
    num_correct_drafts: int | None
    num_proposed_drafts: int | None
    num_rounds: int | None
    """Verify steps of this request; None where the server does not say."""
    correct_drafts_histogram: tuple[int, ...]
    """Rounds by their number of correct drafts, from 0; empty where the server does not say."""

    @property
    def identity(self) -> tuple[int, int, int]:
        """What pairs it with the same request of another side."""
        return self.phase, self.index, self.turn

    @property
    def greedy(self) -> bool:
        """Whether the answer is determined by the target alone."""
        return self.temperature == 0.0

    def as_line(self) -> str:
        """One line of requests.jsonl, without its end."""
        data = {key: _rounded(value) for key, value in asdict(self).items()}
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of(cls, data: dict[str, Any]) -> RequestRecord:
        """Read the object of a line.

        Raises:
            TypeError, KeyError: it is none.
        """
        listed = {field.name: data[field.name] for field in fields(cls)}
        for name, value in listed.items():
            if isinstance(value, list):
                listed[name] = tuple(value)
        return cls(**listed)


def read_records(path: Path) -> Iterator[RequestRecord]:
    """Read a requests.jsonl. A last line without its end, left by a killed run, is left out.

    Raises:
        ValueError: a line is no record; names file and line.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield RequestRecord.of(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}:{number}: not a request record: {error!r}") from None


def kinds_of_errors(records: Iterable[RequestRecord]) -> dict[str, int]:
    """How many requests ended with each kind of error."""
    counts = Counter(record.error for record in records if record.error is not None)
    return dict(sorted(counts.items()))


def _rounded(value: Any) -> Any:
    """Microseconds are enough, and keep files small."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
