"""Where random numbers come from: seeds decide, whatever the batch, the width or the rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specstack.verify.uniforms import seeded_uniforms
from specstack_serving.sampling import UniformSource, sampling_tensors

FIRST = torch.tensor([5, 9, 0])
SEEDS: list[int | None] = [11, None, 11]


def source(seed: int = 42) -> UniformSource:
    return UniformSource("cpu", seed)


def batch(seeds: list[int | None], *, greedy: bool = False) -> SimpleNamespace:
    num = len(seeds)
    info = SimpleNamespace(
        temperatures=torch.linspace(0.5, 1.0, num)[:, None],
        top_ks=torch.arange(1, num + 1, dtype=torch.int32),
        top_ps=torch.linspace(0.1, 0.9, num),
        min_ps=torch.linspace(0.0, 0.2, num),
        is_all_greedy=greedy,
        need_top_k_sampling=False,
        need_top_p_sampling=True,
    )
    params = [SimpleNamespace(sampling_seed=seed) for seed in seeds]
    reqs = [SimpleNamespace(sampling_params=p) for p in params]
    return SimpleNamespace(reqs=reqs, sampling_info=info)


def test_seeded_rows_depend_on_seed_and_position_alone() -> None:
    drawn = source().draw(SEEDS, FIRST, 4)
    expected = seeded_uniforms(torch.tensor([11, 11]), FIRST[[0, 2], None] + torch.arange(4))
    assert torch.equal(drawn[[0, 2]], expected)
    assert not torch.equal(drawn[0], drawn[2]), "other positions, other numbers"


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_every_seed_that_the_engine_admits_counts(seed: int) -> None:
    one, two = (source(s).draw([seed], FIRST[:1], 3) for s in (1, 2))
    assert torch.equal(one, two)
    assert bool(((one >= 0) & (one < 1)).all())


def test_seeded_rows_do_not_depend_on_the_batch() -> None:
    alone = source(1).draw([11], FIRST[:1], 4)
    among = source(2).draw([None, 3, 11], torch.tensor([8, 8, 5]), 4)
    assert torch.equal(alone[0], among[2])


@pytest.mark.parametrize("width", [1, 2, 7])
def test_a_wider_draw_extends_a_seeded_row(width: int) -> None:
    wide = source().draw(SEEDS, FIRST, 9)
    narrow = source().draw(SEEDS, FIRST, width)
    assert torch.equal(narrow[[0, 2]], wide[[0, 2], :width])


def test_a_later_round_continues_where_the_earlier_left_a_seeded_row() -> None:
    """The number at a position is the same whether one round gets there or several."""
    whole = source().draw([11], torch.tensor([5]), 6)
    later = source().draw([11], torch.tensor([8]), 3)
    assert torch.equal(whole[:, 3:], later)


def test_unseeded_rows_are_fresh_in_every_round() -> None:
    uniforms = source()
    first, second = (uniforms.draw([None, 11], FIRST[:2], 4) for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert not bool((first[0] == second[0]).any())


@pytest.mark.parametrize("seeds", [SEEDS, [None, None, None], [1, 2, 3]])
def test_ranks_with_the_same_seed_draw_the_same_numbers(seeds: list[int | None]) -> None:
    ranks = [source(7), source(7)]
    for width in (1, 5, 3):
        one, two = (rank.draw(seeds, FIRST, width) for rank in ranks)
        assert torch.equal(one, two)
    assert not torch.equal(
        source(7).draw([None], FIRST[:1], 4), source(8).draw([None], FIRST[:1], 4)
    )


def test_ranks_stay_equal_across_seeded_greedy_and_mixed_batches() -> None:
    ranks = [source(7), source(7)]
    batches: list[tuple[list[int | None], bool]] = [
        (SEEDS, False), (SEEDS, True), ([None], False), ([3], False),
    ]  # fmt: skip
    for seeds, greedy in batches:
        one, two = (
            sampling_tensors(batch(seeds, greedy=greedy), rank, FIRST[: len(seeds)], 4).uniforms
            for rank in ranks
        )
        assert torch.equal(one, two)


def test_the_settings_of_a_batch_are_collected_per_request() -> None:
    made = sampling_tensors(batch(SEEDS), source(), FIRST, num_positions=2)
    assert made.temperature.shape == (3,)
    assert made.top_k.tolist() == [1, 2, 3]
    assert made.top_k.dtype == torch.int64
    assert made.top_p.tolist() == pytest.approx([0.1, 0.5, 0.9])
    assert made.min_p.tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert made.uniforms.shape == (3, 2)
    assert not made.is_all_greedy
    assert made.use_top_k_top_p


@pytest.mark.parametrize(("top_k", "top_p"), [(False, False), (True, False), (False, True)])
def test_the_sort_is_saved_only_when_no_request_filters(top_k: bool, top_p: bool) -> None:
    made = batch(SEEDS)
    made.sampling_info.need_top_k_sampling = top_k
    made.sampling_info.need_top_p_sampling = top_p
    assert sampling_tensors(made, source(), FIRST, 2).use_top_k_top_p is (top_k or top_p)


def test_a_greedy_batch_draws_nothing() -> None:
    uniforms = source()
    greedy = sampling_tensors(batch(SEEDS, greedy=True), uniforms, FIRST, 4)
    assert greedy.uniforms.shape == (3, 4)
    assert torch.equal(uniforms.draw([None], FIRST[:1], 4), source().draw([None], FIRST[:1], 4))
