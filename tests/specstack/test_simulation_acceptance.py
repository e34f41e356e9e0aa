"""Synthetic drafts follow their curve and are calibrated; recorded ones are those of the trace."""

from __future__ import annotations

import numpy as np
import pytest

from specstack.metrics.record import RoundRecord
from specstack.simulation.acceptance import AcceptCurve, SyntheticAcceptance
from specstack.simulation.errors import SimulationError
from specstack.simulation.profiles import BATCHES, BUDGETS, SPEEDUPS, qwen3_8b_h100
from specstack.simulation.recorded import RecordedAcceptance
from specstack.simulation.replay import recorded_load

CURVES = [
    AcceptCurve(((1, 1.6), (3, 2.2), (7, 2.7), (15, 3.1))),
    qwen3_8b_h100().curve,
    AcceptCurve(((4, 1.2),)),
    AcceptCurve(((1, 1.95), (2, 2.85), (3, 3.7))),
]
LENS = np.full(200, 60)


def every_place(source):
    requests = np.arange(len(LENS))
    for emitted in range(int(LENS[0])):
        yield source.drafts(requests, np.full(len(LENS), emitted), requests)


@pytest.mark.parametrize("curve", CURVES)
def test_accept_lengths_follow_the_curve_and_every_draft_its_survival(curve):
    width = curve.points[-1][0]
    source = SyntheticAcceptance(curve, width, LENS, seed=0)
    told, correct, places = np.zeros(width), np.zeros(width + 1), 0
    for drafts in every_place(source):
        assert (np.diff(drafts.survivals, axis=1) <= 1e-6).all()
        assert drafts.survivals.max() <= 1 + 1e-6
        told += drafts.chances.sum(axis=0)
        correct += np.bincount(drafts.ranks.ravel(), minlength=width + 1)
        places += len(LENS)
    np.testing.assert_allclose(correct[1:] / places, told / places, atol=0.012)
    for budget, length in curve.points:
        assert 1 + told[:budget].sum() / places == pytest.approx(length, rel=0.04)
        assert 1 + correct[1 : budget + 1].sum() / places == pytest.approx(length, rel=0.04)


def test_an_optimistic_drafter_promises_more_than_it_keeps():
    sources = [SyntheticAcceptance(CURVES[0], 15, LENS, 0, optimism) for optimism in (1.0, 2.0)]
    for honest, optimist in zip(*map(every_place, sources), strict=True):
        np.testing.assert_array_equal(honest.ranks, optimist.ranks)
        np.testing.assert_array_equal(honest.chances, optimist.chances)
        assert optimist.survivals.sum() > 1.3 * honest.survivals.sum()


def test_drafts_depend_on_the_request_and_the_place_alone():
    source = SyntheticAcceptance(CURVES[0], 15, LENS, seed=0)
    few = source.drafts(np.array([7, 3]), np.array([11, 5]), np.array([1, 1]))
    many = source.drafts(np.array([1, 3, 7]), np.array([9, 5, 11]), np.array([4, 4, 4]))
    np.testing.assert_array_equal(few.survivals, many.survivals[[2, 1]])
    np.testing.assert_array_equal(few.ranks, many.ranks[[2, 1]])
    other = SyntheticAcceptance(CURVES[0], 15, LENS, seed=1)
    assert (other.drafts(np.array([7]), np.array([11]), np.array([1])).survivals
            != few.survivals[:1]).any()  # fmt: skip


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (((3, 2.0), (2, 2.5)), "must rise"),
        (((1, 1.0),), "must rise"),
        (((2, 1.1), (4, 3.0)), "faster and faster"),
        (((1, 2.5),), "faster and faster"),
    ],
)
def test_impossible_curves_are_refused(points, message):
    with pytest.raises(SimulationError, match=message):
        AcceptCurve(points).survivals(8)


def test_the_profile_gives_the_published_speedups():
    profile = qwen3_8b_h100()
    lengths = dict(profile.curve.points)
    verify = np.array(profile.costs.verify_ms)[:, :, 0]
    steps = verify + np.array(profile.costs.draft_ms)
    for row in range(len(BATCHES)):
        for column, budget in enumerate(BUDGETS):
            speedup = lengths[budget] * steps[row, 0] / steps[row, column + 1]
            assert speedup == pytest.approx(SPEEDUPS[row, column], rel=1e-3)
    assert (np.diff(steps, axis=0) > 0).all()
    assert (np.diff(steps, axis=1) > 0).all()


def a_round(ids, survivals, ranks, num_drafts, **changes):
    correct = tuple(sum(rank > 0 for rank in row) for row in ranks)
    values = {
        "num_requests": len(ids), "num_opted_out": 0, "num_drafting": len(ids), "draft_budget": 3,
        "reason": "fixed", "num_draft_tokens": 4, "nodes_per_depth": (), "draft_seconds": 0.0,
        "build_seconds": 0.0, "verify_seconds": 0.01, "accept_seconds": 0.0,
        "num_correct": correct, "num_drafts": num_drafts, "request_ids": ids,
        "survivals": np.array(survivals, dtype=np.float32), "accept_ranks": np.array(ranks),
        "context_lens": (9,) * len(ids), "step_seconds": 0.01,
    }  # fmt: skip
    return RoundRecord(**(values | changes))


TRACE = [
    a_round(("a", "b"), [[0.8, 0.4, 0.2], [0.5, 0.25, 0]], [[1, 3], [0, 0]], (3, 2)),
    a_round(("a",), [[]], [[]], (0,), draft_budget=0),
    a_round(("a",), [[0.6, 0.3, 0.1]], [[1]], (2,)),
]


def test_recorded_rounds_are_replayed_in_order_and_again():
    source = RecordedAcceptance(TRACE, width=3)
    first = source.drafts(np.array([0, 1]), np.array([1, 1]), np.array([0, 0]))
    np.testing.assert_allclose(first.survivals, [[0.8, 0.4, 0.2], [0.5, 0.25, 0]])
    assert [sorted(row[row > 0]) for row in first.ranks] == [[1, 3], []]
    later = source.drafts(np.array([0, 0, 2]), np.array([9, 9, 9]), np.array([1, 2, 3]))
    np.testing.assert_allclose(later.survivals[:, 0], [0.6, 0.8, 0.6])
    assert source.num_requests == 2


def test_beyond_the_recorded_budget_survivals_go_on_falling():
    source = RecordedAcceptance(TRACE, width=6)
    row = source.drafts(np.array([0]), np.array([1]), np.array([0])).survivals[0]
    np.testing.assert_allclose(row, [0.8, 0.4, 0.2, 0.1, 0.05, 0.025], rtol=1e-5)
    ended = source.drafts(np.array([1]), np.array([1]), np.array([0])).survivals[0]
    np.testing.assert_allclose(ended[2:], 0)


def test_unverified_drafts_of_a_trace_are_drawn_with_their_survival():
    rounds = [a_round(("a",), [[0.9, 0.5, 0.5]], [[1]], (1,)) for _ in range(3000)]
    source = RecordedAcceptance(rounds, width=3)
    places = np.arange(3000)
    drafts = source.drafts(np.zeros(3000, dtype=np.int64), places, places)
    counts = np.bincount(drafts.ranks.ravel(), minlength=4)[1:]
    assert counts[0] == 3000
    np.testing.assert_allclose(counts[1:] / 3000, 0.5, atol=0.03)


def test_hindsight_knows_that_a_drafter_promised_too_much():
    rounds = [a_round(("a",), [[0.8]], [[int(n % 5 == 0)]], (1,)) for n in range(1000)]
    drafts = RecordedAcceptance(rounds, width=1).drafts(*np.zeros((3, 1), dtype=np.int64))
    assert drafts.survivals[0, 0] == pytest.approx(0.8)
    assert drafts.chances[0, 0] == pytest.approx(0.2, abs=0.02)


def test_a_trace_without_drafts_is_refused():
    with pytest.raises(SimulationError, match="the trace has no round that drafted"):
        RecordedAcceptance([TRACE[1]], width=3)


def test_the_load_of_a_trace_has_its_requests():
    rounds = [
        a_round(("a",), [[0.5]], [[1]], (1,), started_at=100.0, context_lens=(20,)),
        a_round(("a", "b"), [[0.5], [0.5]], [[0], [1]], (1, 1), started_at=101.5,
                context_lens=(22, 8)),
    ]  # fmt: skip
    load = recorded_load(rounds)
    np.testing.assert_allclose(load.arrivals, [0.0, 1.5])
    assert load.prompt_lens.tolist() == [19, 7]
    assert load.output_lens.tolist() == [4, 3]
    with pytest.raises(SimulationError, match="the trace holds no request"):
        recorded_load([])
