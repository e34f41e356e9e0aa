"""Accepted paths come to the front of their windows, in any pool of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.pool import CpuMHATokenToKVPool
from specstack_serving.kv_move import move_paths, plain_rows

WINDOW = torch.tensor([[7, 3, 9, 1], [4, 5, 6, 8]])
PATHS = torch.tensor([[0, 2, -1], [0, 1, 3]])


class PageMajor(CpuMHATokenToKVPool):
    """A layout of its own, as the engine has several."""

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        self.moved = dict(zip(tgt_loc.tolist(), src_loc.tolist(), strict=True))


def make(kind: type[Any], *shape: int, scales: Any = None) -> Any:
    pool = object.__new__(kind)
    pool.k_buffer = [torch.randn(*shape) for _ in range(2)]
    pool.v_buffer = [torch.randn(*shape) for _ in range(2)]
    pool.k_scale_buffer = scales
    return pool


@pytest.mark.parametrize("kind", [sgl.MHATokenToKVPool, CpuMHATokenToKVPool])
def test_plain_rows_are_moved_in_all_layers(kind: type[Any]) -> None:
    pool = make(kind, 12, 2, 4)
    before = [rows.clone() for rows in (*pool.k_buffer, *pool.v_buffer)]
    move_paths(pool, WINDOW, PATHS)
    for old, new in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True):
        expected = old.clone()
        expected[3], expected[6] = old[9], old[8]
        assert torch.equal(new, expected)


def test_another_layout_moves_its_own() -> None:
    pool = make(PageMajor, 12, 2, 4)
    before = pool.k_buffer[0].clone()
    move_paths(pool, WINDOW, PATHS)
    assert pool.moved == {7: 7, 3: 9, 9: 9, 4: 4, 5: 5, 6: 8}
    assert torch.equal(pool.k_buffer[0], before)


@pytest.mark.parametrize(
    "pool",
    [
        make(sgl.MHATokenToKVPool, 3, 2, 4, 4),
        make(sgl.MHATokenToKVPool, 12, 2, 4, scales=[torch.ones(12)]),
        make(PageMajor, 12, 2, 4),
    ],
    ids=["pages", "scales", "a subclass"],
)
def test_rows_with_more_to_them_are_not_plain(pool: Any) -> None:
    assert plain_rows(pool) is None
