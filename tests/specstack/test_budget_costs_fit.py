"""Tables fitted to noisy rounds are near the truth; stored ones are found again by their key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.budget import cost_fit
from specstack.budget.cost_fit import Sample, fit_table
from specstack.budget.cost_store import (
    cost_key,
    load_table,
    machine_name,
    read_table,
    save_table,
    table_path,
)
from specstack.budget.cost_table import CostKey, CostTable, CostTableError
from specstack.facts import HostFacts, ModelFacts
from specstack.plan import Plan, compile
from specstack_dsl import loads

KEY = CostKey(device="cpu", model="m", drafter="ngram", engine="sglang", dtype="float32")
BUDGETS = (0, 1, 3, 7, 15)


def staircase(requests: int, drafts: float, context: float) -> float:
    """Rises at every 16 tokens of the batch, and with the context."""
    tiles = np.ceil(requests * (1 + drafts) / 16)
    return float(10.0 + 4.0 * tiles + 0.0005 * requests * context)


def linear(requests: int, drafts: float, context: float) -> float:
    return 10.0 + 0.5 * requests * (1 + drafts) + 0.0005 * requests * context


def rounds(
    surface, cells, *, noise: float = 0.03, count: int = 40, seed: int = 0, fill: float = 1.0
) -> Iterator[Sample]:
    """Noisy rounds, one in ten disturbed by something else; trees hold `fill` of the budget."""
    random = np.random.default_rng(seed)
    for requests, budget, context in cells:
        for _ in range(count):
            disturbed = 3.0 if random.random() < 0.1 else 1.0
            drafts = budget * fill
            draft = 1.0 + 0.1 * budget if budget else 0.0
            step = surface(requests, drafts, context) * random.normal(1.0, noise) * disturbed
            yield Sample(requests, budget, 1 + drafts, context, draft, step + draft)


def full_grid(sizes=(1, 2, 4, 8, 16), contexts=(200, 2000)):
    return [(r, w, c) for r in sizes for w in BUDGETS for c in contexts]


def errors(table: CostTable, surface) -> float:
    """Largest relative error of the verify times."""
    truth = np.array(
        [
            [[surface(r, w, c) for c in table.contexts] for w in table.draft_budgets]
            for r in table.num_requests
        ]
    )
    return float(np.abs(np.array(table.verify_ms) / truth - 1).max())


@pytest.mark.parametrize("surface", [staircase, linear])
def test_a_surface_is_recovered_from_noisy_rounds(surface) -> None:
    table = fit_table(rounds(surface, full_grid()), KEY, "test")
    assert (table.num_requests, table.draft_budgets) == ((1, 2, 4, 8, 16), BUDGETS)
    assert table.contexts == (200, 2000)
    assert errors(table, surface) < 0.03
    wanted = [0.0] + [1.0 + 0.1 * w for w in BUDGETS[1:]]
    np.testing.assert_allclose(table.draft_ms, [wanted] * 5, rtol=1e-6)


def test_means_instead_of_medians_would_miss_the_surface(monkeypatch) -> None:
    """Control: one disturbed round in ten."""
    monkeypatch.setattr(cost_fit.np, "median", np.mean)
    assert errors(fit_table(rounds(linear, full_grid()), KEY, "test"), linear) > 0.1


def test_without_the_isotonic_step_noise_makes_a_table_that_is_refused(monkeypatch) -> None:
    """Control."""
    known = list(rounds(staircase, full_grid(), noise=0.3, count=4))
    fit_table(known, KEY, "test")
    monkeypatch.setattr("specstack.budget.cost_table.monotone", lambda times: times)
    with pytest.raises(CostTableError, match="falls along"):
        fit_table(known, KEY, "test")


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sets(st.sampled_from(full_grid((1, 3, 8), (100, 3000, 9000))), min_size=1),
    st.floats(0.0, 1.0),
)
def test_any_cells_make_a_rising_table_or_say_what_is_missing(seed, cells, noise) -> None:
    always = {(4, 0, 100), (4, 15, 100)}
    known = rounds(linear, sorted(cells | always), noise=noise, count=3, seed=seed)
    refused = ""
    try:
        table = fit_table((s for s in known if s.step_ms > 3.0), KEY, "test")
    except CostTableError as error:
        refused = str(error)
    if refused:
        assert "flat" in refused or "needs 3 timed rounds" in refused
        return
    times = np.array(table.verify_ms)
    assert all((np.diff(times, axis=axis) >= 0).all() for axis in range(3))
    assert (np.diff(table.draft_ms, axis=0) >= 0).all()
    assert (np.diff(table.draft_ms, axis=1) >= 0).all()


def test_a_context_measured_at_two_batch_sizes_is_filled_in_at_the_others() -> None:
    cells = full_grid((1, 2, 4, 8, 16), (200,)) + full_grid((1, 8), (2000,))
    table = fit_table(rounds(linear, cells, noise=0.0, count=25), KEY, "test")
    assert table.contexts == (200, 2000)
    assert errors(table, linear) < 0.01
    # Control: were the short context's times taken as they are, long ones would cost as much.
    times = np.array(table.verify_ms)
    assert (times[2, :, 1] > times[2, :, 0] * 1.05).all()


def test_budgets_between_and_beyond_measured_ones_are_filled_in() -> None:
    cells = full_grid((1, 4), (200,))
    sparse = [cell for cell in cells if cell[0] == 1 or cell[1] in (0, 1, 7)]
    table = fit_table(rounds(linear, sparse, noise=0.0, count=25), KEY, "test")
    assert errors(table, linear) < 0.01


def test_trees_that_were_not_full_are_taken_for_what_they_held() -> None:
    known = list(rounds(linear, full_grid((1, 4), (200,)), noise=0.0, count=25, fill=0.5))
    assert errors(fit_table(known, KEY, "test"), linear) < 0.01
    # Control: taken for full, they make large budgets look cheap.
    wrong = [s._replace(num_tokens=1.0 + s.draft_budget) for s in known]
    assert errors(fit_table(wrong, KEY, "test"), linear) > 0.1


@pytest.mark.parametrize(
    ("cells", "count", "found"),
    [
        ([], 3, "found 0 rounds"),
        ([(1, 0, 100), (2, 3, 100)], 5, r"found 10 rounds, of requests x budget 1x0, 2x3"),
        ([(1, 1, 100), (1, 3, 100)], 5, r"1x1, 1x3"),
        ([(1, 0, 100), (1, 3, 9000)], 5, r"1x0, 1x3"),
        ([(1, 0, 100), (1, 3, 100)], 2, r"found 4 rounds"),
    ],
)
def test_too_few_cells_are_refused_with_what_there_is(cells, count, found) -> None:
    with pytest.raises(CostTableError, match="plain decoding .* one more budget.*" + found):
        fit_table(rounds(linear, cells, count=count), KEY, "test")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SPECSTACK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specstack" / "costs"


def fitted(key: CostKey = KEY) -> CostTable:
    return fit_table(rounds(linear, full_grid((1, 4), (200,))), key, "test")


class TestStore:
    def test_a_table_is_found_by_its_key_alone(self, cache: Path) -> None:
        assert load_table(KEY) is None
        table = fitted()
        assert save_table(table) == table_path(KEY) == cache / f"{KEY.digest}.json"
        assert load_table(KEY) == table
        assert load_table(KEY.model_copy(update={"dtype": "bfloat16"})) is None
        assert [file.name for file in cache.iterdir()] == [f"{KEY.digest}.json"]

    def test_a_write_that_fails_leaves_what_was_there(self, cache, monkeypatch) -> None:
        table = fitted()
        save_table(table)

        def fail(*args: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            save_table(fitted().model_copy(update={"command": "other"}))
        assert load_table(KEY) == table
        assert len(list(cache.iterdir())) == 1

    def test_a_table_of_another_machine_is_refused_field_by_field(self, tmp_path: Path) -> None:
        path = save_table(fitted(), tmp_path / "t.json")
        assert read_table(path).key == KEY
        other = KEY.model_copy(update={"device": "gpu", "dtype": "bfloat16"})
        with pytest.raises(CostTableError) as error:
            read_table(path, other)
        text = str(error.value)
        assert "device is 'cpu', here it is 'gpu'; dtype is 'float32', here it is" in text
        assert "model is" not in text

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "no cost table: Expecting"), ("{}", "no cost table: key: Field required"),
         (None, "No such file")],
    )  # fmt: skip
    def test_what_is_no_table_is_refused(self, tmp_path: Path, text, message) -> None:
        path = tmp_path / "t.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(CostTableError, match=message):
            read_table(path)

    def test_a_stored_table_that_was_tampered_with_is_refused(self, cache: Path) -> None:
        path = save_table(fitted())
        data = json.loads(path.read_text())
        data["verify_ms"][0][0][0] = 1e6
        path.write_text(json.dumps(data))
        with pytest.raises(CostTableError, match="verify_ms falls along"):
            load_table(KEY)


HOST = HostFacts(accelerator="none", num_accelerators=0, memory_bytes=16 * 2**30, num_cpus=4)
GPU = replace(HOST, accelerator="nvidia", num_accelerators=2)
FACTS = ModelFacts(
    architecture="LlamaForCausalLM", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4,
    head_dim=16, vocab_size=256, max_position_embeddings=8192,
)  # fmt: skip


def plan(text: str = "", host: HostFacts = HOST) -> Plan:
    return compile(loads("version: 1\ntarget: org/m\n" + text), model_facts=FACTS, host_facts=host)


class TestKey:
    def test_it_names_machine_model_drafter_and_engine(self) -> None:
        key = cost_key(plan(), "a CPU", 2, "0.5.23")
        assert (key.device, key.model, key.dtype) == ("a CPU", "org/m", "float32")
        assert key.engine.startswith("sglang 0.5.23, ")
        assert key.engine.endswith("tp 1, threads 2")
        assert key.drafter.startswith("ngram, tree ")

    @pytest.mark.parametrize(
        "text",
        [
            "budget: {kind: fixed, draft_budget: 3}\n",
            "engine: {context_length: 2048}\n",
            "engine: {port: 31000}\n",
            "metrics: {prefix: other}\n",
        ],
    )
    def test_what_costs_the_same_has_the_same_key(self, text: str) -> None:
        assert cost_key(plan(text), "c", 2, "1") == cost_key(plan(), "c", 2, "1")

    @pytest.mark.parametrize(
        "text",
        [
            "drafter: {kind: ngram, max_match: 4}\n",
            "tree: chain\n",
            "engine: {tp: 2}\n",
            "engine: {args: {chunked_prefill_size: 64}}\n",
        ],
    )
    def test_what_costs_otherwise_has_another_key(self, text: str) -> None:
        """Control."""
        assert cost_key(plan(text, GPU), "c", 2, "1") != cost_key(plan("", GPU), "c", 2, "1")

    def test_threads_count_on_a_cpu_alone(self) -> None:
        assert cost_key(plan(), "c", 2, "1") != cost_key(plan(), "c", 4, "1")
        assert cost_key(plan("", GPU), "g", 2, "1") == cost_key(plan("", GPU), "g", 4, "1")

    def test_the_processor_says_its_name(self, tmp_path: Path) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text("processor : 0\nmodel name\t: Some  CPU @ 2 GHz\n")
        assert machine_name(file) == "Some CPU @ 2 GHz"
        assert machine_name(tmp_path / "none") != ""
