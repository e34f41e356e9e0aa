"""What single records say: latencies, tokens and goodness."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_folders import answer, failed

from specstack_loadtest import answers
from specstack_loadtest.scenario import Slo


def test_latencies_of_one_answer() -> None:
    record = answer(10.0, late_s=0.02, ttft_s=0.3, gap_s=0.1, chunks=5, per_chunk=2)
    assert answers.ttft_s(record) == pytest.approx(0.3)  # from when it was due, not sent
    assert answers.gaps_s(record).tolist() == pytest.approx([0.1] * 4)
    assert answers.tpot_s(record) == pytest.approx(0.4 / 9)
    assert answers.end_to_end_s(record) == pytest.approx(0.7)
    assert answers.tokens_per_s(record) == pytest.approx(10 / 0.7)


def test_an_answer_that_came_at_once_has_no_time_per_token() -> None:
    record = answer(0.0, chunks=1, per_chunk=8)
    assert answers.tpot_s(record) is None
    assert answers.gaps_s(record).size == 0
    assert answers.is_good(record, Slo(tpot_ms=1.0))


def test_tokens_arrive_with_their_chunks() -> None:
    times, amounts = answers.token_arrivals(answer(0.0, chunks=3, per_chunk=4))
    assert amounts.tolist() == [4, 4, 4]
    assert times.tolist() == pytest.approx([0.1, 0.15, 0.2])


def test_tokens_without_text_arrive_with_the_end() -> None:
    times, amounts = answers.token_arrivals(answer(0.0, chunks=3, output_tokens=4, end_s=0.5))
    assert (times[-1], amounts.tolist()) == (0.5, [1, 1, 1, 1])


def test_tokens_that_nobody_counted_are_spread_evenly() -> None:
    record = answer(0.0, chunks=4, output_tokens=10, chunk_tokens=())
    assert answers.token_arrivals(record)[1].tolist() == [2.5] * 4
    uncounted = replace(record, output_tokens=None)
    assert answers.token_arrivals(uncounted)[1].tolist() == [1.0] * 4


def test_goodness_is_within_every_bound() -> None:
    record = answer(0.0, ttft_s=0.4, gap_s=0.05)
    assert answers.is_good(record, Slo(ttft_ms=500, tpot_ms=60))
    assert not answers.is_good(record, Slo(ttft_ms=300))
    assert not answers.is_good(record, Slo(tpot_ms=40))
    assert not answers.is_good(failed(0.0), Slo(ttft_ms=500))
