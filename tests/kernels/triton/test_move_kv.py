"""Moves of the KV of accepted paths in Triton: equal the loop, for any dtype and mix of pools."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.move_kv import move_kv as reference
from specstack_kernels.testing_paths import random_paths
from specstack_kernels.triton import move_kv as module
from specstack_kernels.triton.move_kv import move_kv

SHAPES = [(1, 1, 1), (1, 7, 7), (3, 17, 6), (2, 64, 33)]
"""(B, N, K): a lone root, a window of which all may be accepted, odd, several groups of steps."""
IDS = ["B{}-N{}-K{}".format(*shape) for shape in SHAPES]
POISON = -0x5EADBEEF0BAD


def random_pool(paths, shape, dtype, seed=0):
    """Different bytes in every row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (paths.num_slots, *shape), generator=generator).to(dtype)


def assert_moves_as_defined(pools, paths):
    expected = [pool.clone() for pool in pools]
    move_kv(pools, paths.window, paths.accept_index)
    reference(expected, paths.window, paths.accept_index)
    for a, b in zip(pools, expected, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("batch", "nodes", "width"), SHAPES, ids=IDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]
)
def test_equals_the_definition(batch, nodes, width, dtype):
    for seed in range(3):
        paths = random_paths(batch, nodes, width, seed)
        assert_moves_as_defined([random_pool(paths, (2, 8), dtype, i) for i in range(2)], paths)


def test_pools_of_many_kinds():
    """Keys and values of other sizes and types; odd rows; rows of more than a block of words."""
    paths = random_paths(3, 17, 6, 0)
    shapes = [((8, 128), torch.bfloat16), ((3, 5), torch.float16), ((3, 5), torch.uint8)]
    shapes += [((1000,), torch.float64), ((2, 6), torch.float32), ((2, 6), torch.bfloat16)]
    pools = [random_pool(paths, *kind, seed=i) for i, kind in enumerate(2 * shapes)]
    assert_moves_as_defined(pools, paths)


def test_rows_of_a_larger_tensor():
    """Keys and values beside each other in one buffer, at odd addresses."""
    paths = random_paths(3, 17, 6, 1)
    both = random_pool(paths, (2, 2, 7), torch.bfloat16)
    assert_moves_as_defined([both[:, 0], both[:, 1]], paths)
    odd = random_pool(paths, (9,), torch.uint8)[:, 1:8]
    assert_moves_as_defined([odd], paths)


def test_slots_beyond_the_path_are_not_read():
    """Nobody owns the others: a slot that is out of range would be noticed."""
    paths = random_paths(3, 17, 6, 2)
    used = torch.zeros_like(paths.window, dtype=torch.bool)
    index = torch.where(paths.accept_index >= 0, paths.accept_index, 0)
    used.scatter_(1, index, True)
    used[:, :6] |= paths.accept_index >= 0
    pools = [random_pool(paths, (2, 8), torch.float32)]
    expected = [pool.clone() for pool in pools]
    move_kv(pools, paths.window.masked_fill(~used, POISON), paths.accept_index)
    reference(expected, paths.window, paths.accept_index)
    assert torch.equal(pools[0], expected[0])


def test_pools_of_one_kind_share_a_launch(monkeypatch):
    launches = []

    class Recorded:
        def __getitem__(self, grid):
            launches.append(grid)
            return module_kernel[grid]

    module_kernel = module._move_kv_kernel
    monkeypatch.setattr(module, "_move_kv_kernel", Recorded())
    paths = random_paths(3, 17, 6, 3)
    pools = [random_pool(paths, (2, 8), torch.bfloat16, i) for i in range(8)]
    assert_moves_as_defined(pools, paths)
    assert launches == [(3, 8, 1)]


def test_pools_that_moved_in_memory_get_a_new_table():
    paths = random_paths(2, 7, 4, 0)
    for seed in range(3):
        assert_moves_as_defined([random_pool(paths, (2, 8), torch.float32, seed)], paths)


def test_rows_must_be_contiguous():
    paths = random_paths(2, 7, 4, 0)
    pool = random_pool(paths, (4, 6), torch.float32).transpose(1, 2)
    with pytest.raises(AssertionError, match=r"rows of shape .* strides"):
        move_kv([pool], paths.window, paths.accept_index)


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
