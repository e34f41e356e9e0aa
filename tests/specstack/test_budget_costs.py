"""Cost tables rise and have a slope; the model interpolates them and learns from rounds."""

from __future__ import annotations

import json
import timeit
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specstack.budget.costs import (
    CORRECTION_LIMIT,
    LASTING,
    MAX_SAMPLES,
    CostKey,
    CostModel,
    CostTable,
    CostTableError,
)
from specstack.budget.monotone import isotonic, monotone
from specstack.metrics.record import RoundRecord

KEY = CostKey(device="cpu", model="m", drafter="ngram", engine="sglang", dtype="float32")
REQUESTS, BUDGETS, CONTEXTS = (1, 2, 4, 8), (0, 1, 3, 7), (128, 2048)


def verify_ms(requests: float, drafts: float, context: float) -> float:
    """Linear in everything, but for a fixed price of trees."""
    trees = 3.0 if drafts else 0.0
    return 20.0 + trees + 0.8 * requests * (1 + drafts) + 0.001 * requests * context


def draft_ms(budget: float) -> float:
    return 4.0 + 0.2 * budget if budget else 0.0


def table(**changed: Any) -> CostTable:
    verify = [[[verify_ms(r, w, c) for c in CONTEXTS] for w in BUDGETS] for r in REQUESTS]
    values: dict[str, Any] = {
        "key": KEY, "num_requests": REQUESTS, "draft_budgets": BUDGETS, "contexts": CONTEXTS,
        "verify_ms": np.array(verify), "num_rounds": 100, "command": "test",
        "draft_ms": np.array([[draft_ms(w) for w in BUDGETS]] * len(REQUESTS)),
    }  # fmt: skip
    return CostTable.fitted(**{**values, **changed})


def record(
    step_ms: float | None, *, requests: int = 4, budget: int = 3, drafts: int | None = None,
    context: int = 128, opted_out: int = 0,
) -> RoundRecord:  # fmt: skip
    drafts = budget if drafts is None else drafts
    return RoundRecord(
        num_requests=requests, num_opted_out=opted_out, num_drafting=requests,
        draft_budget=budget, reason="fixed", num_draft_tokens=1 + budget, nodes_per_depth=(),
        draft_seconds=0.001, build_seconds=0.0, verify_seconds=0.0, accept_seconds=0.0,
        num_correct=(0,) * requests, num_drafts=(drafts,) * requests,
        context_lens=(context,) * requests,
        step_seconds=None if step_ms is None else step_ms / 1000,
    )  # fmt: skip


def full_step(model: CostModel, requests: int, context: float, budgets: Any = BUDGETS) -> Any:
    """Predicted milliseconds of full trees [C]."""
    choices = np.array(budgets)
    return model.step_ms(requests, context, choices, 1.0 + choices[:, None])[:, 0]


class TestMonotone:
    def test_neighbours_in_the_wrong_order_become_their_mean(self) -> None:
        assert isotonic(np.array([1.0, 3.0, 2.0, 2.0, 5.0])).tolist() == pytest.approx(
            [1.0, 7 / 3, 7 / 3, 7 / 3, 5.0]
        )

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(1, 5)] * 3))
    def test_any_noise_is_forced_to_rise(self, seed: int, shape: tuple[int, ...]) -> None:
        found = monotone(np.random.default_rng(seed).lognormal(size=shape))
        assert all((np.diff(found, axis=axis) >= 0).all() for axis in range(3))

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 2**32 - 1))
    def test_what_rises_is_not_touched(self, seed: int) -> None:
        times = np.random.default_rng(seed).random((3, 4, 2))
        for axis in range(3):
            times = times.cumsum(axis=axis)
        np.testing.assert_allclose(monotone(times), times)


class TestTable:
    def test_it_survives_json(self) -> None:
        assert CostTable.model_validate_json(table().model_dump_json()) == table(
            measured_at=table().measured_at
        )

    def test_a_noisy_table_is_forced_by_fitted_and_refused_when_read(self) -> None:
        """Control of the isotonic step: the same times, as they were measured, are refused."""
        noise = np.random.default_rng(0).normal(1.0, 0.2, (4, 4, 2))
        noisy = np.array(table().verify_ms) * noise
        data = json.loads(table(verify_ms=noisy).model_dump_json())
        CostTable.model_validate(data)
        with pytest.raises(ValidationError, match="verify_ms falls along num_requests"):
            CostTable.model_validate({**data, "verify_ms": noisy.tolist()})

    def test_a_flat_table_is_refused_with_both_times(self) -> None:
        flat = np.full((4, 4, 2), 20.0)
        flat[-1, -1] = 20.5
        with pytest.raises(CostTableError, match=r"flat: 20.000 ms .* 20.500 ms for 8, at 8 req"):
            table(verify_ms=flat)
        flat[-1, -1] = 20.7  # control: 3.5 % is a slope
        table(verify_ms=flat)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"num_requests": (2, 1, 4, 8)}, "num_requests must hold rising numbers, got"),
            ({"num_requests": (0, 1, 4, 8)}, "num_requests must begin at 1 or more"),
            ({"draft_budgets": (1, 3, 7, 15)}, "draft_budgets must hold 0 and at least one more"),
            ({"contexts": ()}, "contexts must hold rising numbers"),
            ({"contexts": (1, 2, 3)}, r"verify_ms must have the shape \(4, 4, 3\)"),
            ({"draft_ms": np.zeros((4, 3))}, r"draft_ms must have the shape \(4, 4\)"),
            ({"draft_ms": np.ones((4, 4))}, "draft_ms must be 0 at budget 0"),
        ],
    )
    def test_bad_axes_and_times_are_refused(self, changed: dict[str, Any], message: str) -> None:
        with pytest.raises(CostTableError, match=message):
            table(**changed)

    def test_the_digest_is_of_every_field(self) -> None:
        names = [*CostKey.model_fields]
        digests = {KEY.digest, *(KEY.model_copy(update={n: "x"}).digest for n in names)}
        assert len(digests) == 1 + len(names)
        assert {len(digest) for digest in digests} == {12}


class TestPredictions:
    @pytest.mark.parametrize("ragged", [True, False])
    @pytest.mark.parametrize("requests", [1, 3, 8, 20])
    @pytest.mark.parametrize("context", [128, 1024, 4096])
    def test_a_linear_surface_is_met_between_and_beyond(
        self, ragged: bool, requests: int, context: int
    ) -> None:
        budgets = (0, 1, 2, 5, 7, 15)
        found = full_step(CostModel(table(), ragged=ragged), requests, context, budgets)
        wanted = [verify_ms(requests, w, context) + draft_ms(w) for w in budgets]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)

    def test_unverified_drafts_cost_nothing_only_where_batches_are_ragged(self) -> None:
        budgets, tokens = np.array([7]), np.array([[8.0, 4.0, 1.0]])
        ragged = CostModel(table()).step_ms(4, 128, budgets, tokens)[0]
        wanted = [verify_ms(4, w, 128) + draft_ms(7) for w in (7, 3, 1e-9)]
        np.testing.assert_allclose(ragged, wanted, rtol=1e-5)
        padded = CostModel(table(), ragged=False).step_ms(4, 128, budgets, tokens)[0]
        assert padded.tolist() == [ragged[0]] * 3

    def test_a_round_without_drafts_pays_for_drafting_them_and_plain_decoding_does_not(
        self,
    ) -> None:
        model = CostModel(table())
        tokens = np.ones((2, 1))
        plain, drafting = model.step_ms(4, 128, np.array([0, 7]), tokens)[:, 0]
        assert plain == pytest.approx(verify_ms(4, 0, 128))
        assert drafting == pytest.approx(plain + 3.0 + draft_ms(7))

    def test_beyond_the_table_times_never_fall(self) -> None:
        """Contexts cost less at the larger batch: extrapolating both would fall."""
        times = np.array(table().verify_ms)
        times[:, :, 1] = np.maximum(times[:, :, 0], times[-1, :, 1])
        model = CostModel(table(verify_ms=times))
        steps = np.array([full_step(model, r, 9000) for r in (1, 2, 8, 16, 64)])
        assert (np.diff(steps, axis=0) >= 0).all()
        assert (np.diff(steps, axis=1) >= 0).all()

    def test_one_batch_size_and_context_hold_for_all(self) -> None:
        small = table(
            num_requests=(2,), contexts=(100,), verify_ms=np.array(table().verify_ms)[1:2, :, :1],
            draft_ms=np.array(table().draft_ms)[:1],
        )  # fmt: skip
        model = CostModel(small)
        np.testing.assert_array_equal(full_step(model, 2, 100), full_step(model, 9, 3000))

    def test_an_answer_takes_microseconds(self) -> None:
        """15 are aimed at; a shared machine gets four times as long."""
        model, budgets = CostModel(table()), np.array([0, 1, 2, 3, 5, 7])
        tokens = 1.0 + np.outer(budgets, np.linspace(1, 0.2, 7))
        runs = timeit.repeat(lambda: model.step_ms(3, 300, budgets, tokens), number=200, repeat=20)
        assert min(runs) / 200 < 60e-6


class TestLearning:
    def feed(self, model: CostModel, factor: Any, rounds: int = 400) -> None:
        """Rounds of all budgets in turn, `factor(budget)` times slower than the table."""
        for i in range(rounds):
            budget = BUDGETS[i % 4]
            step = verify_ms(4, budget, 128) + draft_ms(budget)
            model.observe(record(step * factor(budget), budget=budget))

    def test_a_slower_machine_is_noticed_and_changes_no_ratio(self) -> None:
        model = CostModel(table())
        before = full_step(model, 4, 128)
        self.feed(model, lambda budget: 1.5)
        after = full_step(model, 4, 128)
        np.testing.assert_allclose(after / before, 1.5, rtol=0.02)
        assert np.ptp(after / before) < 0.04
        assert model.drift < 0.05

    def test_one_budget_that_costs_more_is_corrected(self) -> None:
        model = CostModel(table())
        before = full_step(model, 4, 128)
        self.feed(model, lambda budget: 1.4 if budget == 7 else 1.0, 2000)
        ratio = full_step(model, 4, 128) / before
        np.testing.assert_allclose(ratio[3] / ratio[:3], 1.4, rtol=0.05)
        assert model.drift > 0.05
        assert len(model.state["corrections"]) > 0
        # Control: what was learned at 4 requests is not said of 1.
        other = full_step(model, 1, 128) / full_step(CostModel(table()), 1, 128)
        np.testing.assert_allclose(other / other[0], 1.0, rtol=1e-6)

    def test_corrected_times_still_rise_along_the_budgets(self) -> None:
        model = CostModel(table())
        self.feed(model, lambda budget: {1: 1.9, 3: 0.6, 7: 0.6}.get(budget, 1.0), 4000)
        assert np.exp(model._used[2, 3]) < 0.8  # the raw correction would let it fall
        assert (np.diff(full_step(model, 4, 128)) >= 0).all()

    def test_corrections_are_bounded(self) -> None:
        model = CostModel(table())
        self.feed(model, lambda budget: 4.0 if budget == 7 else 1.0, 6000)
        assert np.abs(model._learned).max() <= CORRECTION_LIMIT

    def test_outliers_and_untimed_rounds_teach_nothing(self) -> None:
        model = CostModel(table())
        before = full_step(model, 4, 128)
        for _ in range(LASTING):
            model.observe(record(verify_ms(4, 3, 128) * 20))
            model.observe(record(None))
        np.testing.assert_array_equal(full_step(model, 4, 128), before)
        assert (model.num_outliers, model.num_observed) == (LASTING, 0)

    def test_outliers_that_last_are_what_rounds_cost_now(self) -> None:
        model = CostModel(table())
        before = full_step(model, 4, 128)
        for _ in range(LASTING * 200):
            model.observe(record(verify_ms(4, 3, 128) * 20))
        assert (full_step(model, 4, 128) > 10 * before).all()

    def test_the_same_rounds_leave_the_same_model(self) -> None:
        one, two = CostModel(table(measured_at="")), CostModel(table(measured_at=""))
        for model in (one, two):
            self.feed(model, lambda budget: 1.0 + budget / 20)
            full_step(model, 2, 500)  # being asked changes nothing
        full_step(two, 7, 900)
        assert one.state == two.state
        json.dumps(one.state)

    def test_another_table_drops_what_was_learned(self) -> None:
        model = CostModel(table())
        self.feed(model, lambda budget: 2.0)
        model.use(table())
        np.testing.assert_array_equal(
            full_step(model, 4, 128), full_step(CostModel(table()), 4, 128)
        )
        assert (model.source, model.num_observed) == ("measured", 0)


class TestWithoutATable:
    def test_nothing_is_predicted(self) -> None:
        model = CostModel(None)
        assert not model.ready
        assert (model.drift, model.source) == (0.0, "none")
        with pytest.raises(CostTableError, match="no cost table yet: run `specstack bench cost`"):
            full_step(model, 1, 1)

    def test_samples_are_collected_fitted_and_cleared(self) -> None:
        model = CostModel(None)
        for budget in BUDGETS:
            for _ in range(3):
                model.observe(record(verify_ms(4, budget, 128) + 1.0, budget=budget))
        fitted = model.fit(KEY, "test")
        assert (fitted.num_requests, fitted.draft_budgets) == ((4,), BUDGETS)
        assert not model.ready
        model.use(fitted)
        np.testing.assert_allclose(
            full_step(model, 4, 128), [verify_ms(4, w, 128) + 1.0 for w in BUDGETS], rtol=1e-4
        )
        model.clear_samples()
        assert model.state["num_samples"] == 0

    def test_the_newest_samples_are_kept_and_requests_that_opted_out_are_none(self) -> None:
        model = CostModel(None)
        for step in range(1, MAX_SAMPLES + 3):
            model.observe(record(float(step)))
        model.observe(record(1.0, opted_out=1))
        assert len(model.samples) == MAX_SAMPLES
        assert model.samples[-1].step_ms == pytest.approx(MAX_SAMPLES + 2)

    def test_tokens_are_what_the_engine_computed(self) -> None:
        ragged, padded = CostModel(None), CostModel(None, ragged=False)
        for model in (ragged, padded):
            model.observe(record(1.0, budget=7, drafts=2))
        assert (ragged.samples[0].num_tokens, padded.samples[0].num_tokens) == (3.0, 8.0)
