"""Moves of the KV of accepted paths: the vectorised op equals the loop, in place, in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack_kernels.reference.move_kv import move_kv as reference
from specstack_kernels.testing_paths import random_paths
from specstack_kernels.torch_ops.move_kv import move_kv

SHAPES = [(1, 1, 1), (1, 7, 7), (3, 17, 6), (2, 64, 9)]
"""(B, N, K): a lone root, a window of which all may be accepted, odd, a full block."""
IDS = ["B{}-N{}-K{}".format(*shape) for shape in SHAPES]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]


def pools_like(paths, shape, dtype, count=2):
    """Different bytes in every row."""
    size = (count, paths.num_slots, *shape)
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(0, 100, size, generator=generator).to(dtype))


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("batch", "nodes", "width"), SHAPES, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_definition(batch, nodes, width, dtype):
    for seed in range(4):
        paths = random_paths(batch, nodes, width, seed)
        pools = pools_like(paths, (2, 8), dtype)
        expected = [pool.clone() for pool in pools]
        move_kv(pools, paths.window, paths.accept_index)
        reference(expected, paths.window, paths.accept_index)
        assert_same(pools, expected)


@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_moving_step_by_step_does_the_same(batch, nodes, seed):
    """What the definition says about the order k = 0, 1, ..."""
    paths = random_paths(batch, nodes, nodes, seed)
    pool = torch.arange(paths.num_slots)[:, None].repeat(1, 3)
    in_order = pool.clone()
    for b in range(batch):
        for k, node in enumerate(paths.accept_index[b].tolist()):
            if node >= 0:
                in_order[paths.window[b, k]] = in_order[paths.window[b, node]]
    reference([pool], paths.window, paths.accept_index)
    assert torch.equal(pool, in_order)


def test_other_slots_stay():
    paths = random_paths(3, 17, 6, 0)
    pool = torch.arange(paths.num_slots)[:, None].repeat(1, 3)
    before = pool.clone()
    move_kv([pool], paths.window, paths.accept_index)
    targets = paths.window[:, :6][paths.accept_index >= 0]
    is_target = torch.zeros(paths.num_slots, dtype=torch.bool).index_fill(0, targets, True)
    assert torch.equal(pool[~is_target], before[~is_target])
    assert not torch.equal(pool, before)


def test_overlapping_moves_read_before_they_write():
    """Path 0, 2, 3: slot 2 is written by the third step and read by the second."""
    pool = torch.arange(5.0)[:, None]
    move_kv([pool], torch.arange(5)[None], torch.tensor([[0, 2, 3, -1]]))
    assert pool[:, 0].tolist() == [0, 2, 3, 3, 4]


def test_no_pools_and_no_requests():
    paths = random_paths(2, 5, 3, 0)
    move_kv([], paths.window, paths.accept_index)
    pool = torch.ones(4, 2)
    none = torch.zeros((0, 3), dtype=torch.int64)
    move_kv([pool], none, none)
    assert torch.equal(pool, torch.ones(4, 2))


def test_another_path_is_noticed():
    """Control."""
    window = torch.arange(5)[None]
    one, other = torch.arange(5.0)[:, None], torch.arange(5.0)[:, None]
    move_kv([one], window, torch.tensor([[0, 2, 3]]))
    reference([other], window, torch.tensor([[0, 1, 3]]))
    assert not torch.equal(one, other)
