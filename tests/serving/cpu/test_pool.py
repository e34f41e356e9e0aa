"""Row moves of the KV pool and the writers of the request-to-token table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specstack_serving.cpu.pool import (
    CpuMHATokenToKVPool,
    assign_req_to_token_pool,
    get_last_loc,
    speculative_cache_locs,
)


def make_pool(num_slots: int = 32, num_layers: int = 2) -> CpuMHATokenToKVPool:
    """A pool with buffers but none of the engine's state around them."""
    pool = object.__new__(CpuMHATokenToKVPool)
    pool.k_buffer = [torch.randn(num_slots, 2, 4) for _ in range(num_layers)]
    pool.v_buffer = [torch.randn(num_slots, 2, 4) for _ in range(num_layers)]
    return pool


@pytest.mark.parametrize(
    ("source", "target"),
    [([7], [3]), ([4, 5, 6], [3, 4, 5]), ([3, 4, 5], [4, 5, 6]), ([9, 8], [8, 9]), ([], [])],
)
def test_moves_happen_as_if_at_once(source: list[int], target: list[int]) -> None:
    pool = make_pool()
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    src, tgt = torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int32)
    pool._move_kv_cache_impl(tgt, src)
    for old, new in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True):
        expected = old.clone()
        expected[tgt.long()] = old[src]
        assert torch.equal(new, expected)


def test_rows_are_stored_at_their_slots() -> None:
    pool = make_pool()
    keys, values = torch.randn(3, 6, 4)[:, :2], torch.randn(3, 2, 4)
    pool._store_kv_layer(1, torch.tensor([9, 0, 4]), keys, values)
    assert torch.equal(pool.k_buffer[1][[9, 0, 4]], keys)
    assert torch.equal(pool.v_buffer[1][[9, 0, 4]], values)


def assign(table: Tensor, rows: list[int], start: list[int], end: list[int], locs: Tensor) -> None:
    assign_req_to_token_pool(
        torch.tensor(rows), table, torch.tensor(start), torch.tensor(end), locs, len(rows)
    )


def test_slots_land_in_their_columns_and_nowhere_else() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    assign(table, [2, 0, 3], [1, 5, 8], [4, 5, 10], torch.tensor([11, 12, 13, 14, 15]))
    expected = torch.zeros(4, 10, dtype=torch.int32)
    expected[2, 1:4] = torch.tensor([11, 12, 13], dtype=torch.int32)
    expected[3, 8:10] = torch.tensor([14, 15], dtype=torch.int32)
    assert torch.equal(table, expected)


@pytest.mark.parametrize(
    ("start", "end", "count", "message"),
    [
        ([8], [11], 3, "do not fit a row of 10 columns"),
        ([-1], [2], 3, "do not fit a row of 10 columns"),
        ([5], [3], 0, "do not fit a row of 10 columns"),
        ([2], [5], 4, "3 columns to fill, but 4 slots were given"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    start: list[int], end: list[int], count: int, message: str
) -> None:
    table = torch.zeros(2, 10, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        assign(table, [0], start, end, torch.arange(1, count + 1))
    assert not table.any()


def test_window_locations_are_read_row_by_row() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    locs = speculative_cache_locs(
        req_pool_indices=torch.tensor([3, 1]),
        req_to_token=table,
        start_offset=torch.tensor([2, 7]),
        end_offset=torch.tensor([5, 10]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert locs.tolist() == [32, 33, 34, 17, 18, 19]
    assert locs.dtype == torch.int64


def test_last_loc_is_the_slot_before_the_end_or_minus_one() -> None:
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    found = get_last_loc(table, torch.tensor([2, 0, 1]), torch.tensor([3, 0, 8]))
    assert found.tolist() == [18, -1, 15]
