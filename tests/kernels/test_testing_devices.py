"""Ops moved to a device: views, in-place changes and results. The device is another copy here."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specstack_kernels.testing_devices import on_device

COPY = torch.device("cpu")


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def moved(op):
    return on_device(op, COPY)


def test_the_op_sees_copies_of_the_same_values():
    x = torch.arange(6.0).view(2, 3)
    seen = []
    result = moved(lambda y: seen.append(y) or y * 2)(x)
    assert seen[0].data_ptr() != x.data_ptr()
    assert torch.equal(seen[0], x)
    assert torch.equal(result, 2 * x)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:, ::2],
        lambda x: x.t(),
        lambda x: x[:, 1],
        lambda x: x[2:3].expand(4, -1),
        lambda x: x[3, 4],
        lambda x: x[:0],
        lambda x: x.view(torch.int32)[:, 3:],
    ],
    ids=["strided", "transposed", "column", "expanded", "scalar", "empty", "another dtype"],
)
def test_views_keep_strides_and_places(view):
    x = view(torch.arange(30.0).view(5, 6))
    moved(lambda y: check_same_layout(x, y))(x)


def check_same_layout(x, y):
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    assert y.storage_offset() == x.storage_offset()
    assert y.untyped_storage().nbytes() == x.untyped_storage().nbytes()
    assert torch.equal(x, y)


def test_in_place_changes_come_back_through_every_kind_of_argument():
    base = torch.zeros(4, 6)
    expected = base.clone()

    def op(tensors, pair, *, options):
        tensors[0][0] += 1
        tensors[1][0][...] += 2
        pair.right[...] += 3
        options["x"][...] += 4

    arguments = [base[:, 1], (base[1, ::2],)], Pair(base[2], base[3:, 2:4])
    moved(op)(*arguments, options={"x": base[0, 4:]})
    op([expected[:, 1], (expected[1, ::2],)], Pair(expected[2], expected[3:, 2:4]),
       options={"x": expected[0, 4:]})  # fmt: skip
    assert torch.equal(base, expected)
    assert len(base.unique()) == 5


def test_tensors_that_share_memory_share_it_there():
    both = torch.zeros(3, 2)

    def op(left, right):
        left[...] = 1
        assert right.data_ptr() == left.data_ptr() + 4
        right[...] = left + 1

    moved(op)(both[:, 0], both[:, 1])
    assert both.tolist() == [[1, 2]] * 3


def test_results_that_are_arguments_stay_the_callers():
    x = torch.zeros(2, 3)
    result = moved(lambda y: Pair(y[1], y.new_ones(2)))(x)
    assert isinstance(result, Pair)
    result.left[...] = 5
    assert x.tolist() == [[0] * 3, [5] * 3]
    assert result.right.tolist() == [1, 1]


def test_what_is_no_tensor_passes():
    assert moved(lambda *args, **kwargs: (args, kwargs))(1, None, a="b") == ((1, None), {"a": "b"})
    with pytest.raises(ValueError, match="no"):
        moved(lambda: (_ for _ in ()).throw(ValueError("no")))()


def test_without_copies_nothing_would_come_back():
    """Control: what an op does to its copies is seen by the caller because it is copied."""
    x = torch.zeros(3)
    moved(lambda y: y.clone().fill_(1))(x)
    assert x.tolist() == [0, 0, 0]
