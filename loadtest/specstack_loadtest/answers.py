"""What one request record says about latency and tokens, as its reader saw it.

Latencies count from the moment at which a request was due, not from when it was sent: a client or
a server that falls behind makes them longer. Lengths in seconds.
"""

from __future__ import annotations

import numpy as np

from specstack_loadtest.estimates import Floats
from specstack_loadtest.records import RequestRecord
from specstack_loadtest.scenario import Slo


def ttft_s(record: RequestRecord) -> float | None:
    """To the first chunk with text; None: there was none."""
    return record.chunk_s[0] - record.due_s if record.chunk_s else None


def gaps_s(record: RequestRecord) -> Floats:
    """Between chunks with text: inter-token latency as a reader sees it."""
    return np.diff(np.asarray(record.chunk_s, np.float64))


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first chunk; None where all text came at once."""
    num_tokens = output_tokens(record)
    if len(record.chunk_s) < 2 or num_tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (num_tokens - 1)


def end_to_end_s(record: RequestRecord) -> float:
    """To the end of the answer."""
    return record.end_s - record.due_s


def tokens_per_s(record: RequestRecord) -> float | None:
    """Output tokens over the whole time that its reader waited."""
    length_s = end_to_end_s(record)
    return output_tokens(record) / length_s if length_s > 0 else None


def says_tokens_per_chunk(record: RequestRecord) -> bool:
    """Whether the server counted the tokens of each chunk."""
    return bool(record.chunk_s) and len(record.chunk_tokens) == len(record.chunk_s)


def output_tokens(record: RequestRecord) -> int:
    """As the server counted them, else one per chunk."""
    if record.output_tokens is not None:
        return record.output_tokens
    return record.chunk_tokens[-1] if says_tokens_per_chunk(record) else len(record.chunk_s)


def token_arrivals(record: RequestRecord) -> tuple[Floats, Floats]:
    """When tokens arrived, and how many each time.

    Where the server does not count per chunk, they are spread evenly over the chunks. Tokens
    without text, such as the one that ends an answer, arrive with its end.
    """
    times = np.asarray(record.chunk_s, np.float64)
    if not says_tokens_per_chunk(record):
        num = output_tokens(record) if len(times) else 0
        return times, np.full(len(times), num / max(1, len(times)))
    amounts = np.diff(np.asarray(record.chunk_tokens, np.float64), prepend=0.0)
    textless = output_tokens(record) - record.chunk_tokens[-1]
    if record.error is None and textless > 0:
        return np.append(times, record.end_s), np.append(amounts, textless)
    return times, amounts


def accept_length(record: RequestRecord) -> float | None:
    """Tokens per round of this request, the bonus token included; None: the server does not say."""
    if not record.num_rounds or record.num_correct_drafts is None:
        return None
    return 1 + record.num_correct_drafts / record.num_rounds


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Whether it was answered within every bound. An answer that came at once has no time per
    token to exceed.
    """
    if record.error is not None:
        return False
    first, per_token = ttft_s(record), tpot_s(record)
    if slo.ttft_ms is not None and (first is None or first * 1e3 > slo.ttft_ms):
        return False
    return slo.tpot_ms is None or per_token is None or per_token * 1e3 <= slo.tpot_ms
