"""The batched attention equals plain per-request attention, and reads exactly what is visible."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specstack_serving.cpu import attention
from specstack_serving.cpu.attention import (
    LowerRightMask,
    attend_extend,
    attend_window,
    plan_extend,
    plan_window,
    split_requests,
)

HEADS, DIM, SCALE = 3, 16, 0.3
NUM_SLOTS, WIDTH = 4096, 1024


def reference(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """One request, in double precision: q [N, H, G, D], keys [L, H, D], visible [N, L]."""
    scores = torch.einsum("nhgd,lhd->hgnl", q.double(), keys.double()) * SCALE
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hgnl,lhd->nhgd", weights, values.double())


def random_tree(num_nodes: int) -> Tensor:
    """Ancestor relation of a random tree in topological order."""
    mask = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        mask[node] |= mask[int(torch.randint(node, ()))]
    return mask


class Pool:
    """A KV pool of one layer with every request's slots scattered in pages."""

    def __init__(self, lengths: list[int], page_size: int) -> None:
        self.k = torch.randn(NUM_SLOTS, HEADS, DIM)
        self.v = torch.randn(NUM_SLOTS, HEADS, DIM)
        self.rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
        # Stale entries beyond a request's end point anywhere.
        table = torch.randint(NUM_SLOTS, (len(lengths) + 3, WIDTH), dtype=torch.int32)
        pages = (torch.randperm(NUM_SLOTS // page_size - 1) + 1).tolist()
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            for start in range(0, length, page_size):
                count = min(page_size, length - start)
                first = pages.pop() * page_size
                table[row, start : start + count] = torch.arange(first, first + count)
        self.table = table

    def request(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        slots = self.table[self.rows[index], :length].long()
        return self.k[slots], self.v[slots]

    def attend(
        self,
        q: Tensor,
        seq_lens: Tensor,
        trees: Tensor | None,
        num_nodes: list[int] | None = None,
    ) -> Tensor:
        num_nodes = num_nodes or [q.shape[1]] * len(q)
        plan = plan_window(self.table, self.rows, seq_lens, trees, num_nodes)
        return attend_window(plan, q, self.k, self.v, SCALE)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_window", [1, 2, 7, 32])
@pytest.mark.parametrize("lengths", [[1], [37], [5, 5, 5], [3, 17, 16, 33], [700, 2, 9, 640]])
def test_a_window_under_a_tree_equals_the_reference(
    page_size: int, group: int, num_window: int, lengths: list[int]
) -> None:
    torch.manual_seed(len(lengths) * num_window)
    pool = Pool([n + num_window for n in lengths], page_size)
    q = torch.randn(len(lengths), num_window, HEADS, group, DIM)
    trees = torch.stack([random_tree(num_window) for _ in lengths])
    out = pool.attend(q, torch.tensor(lengths), trees)
    for i, length in enumerate(lengths):
        visible = torch.cat([torch.ones(num_window, length, dtype=torch.bool), trees[i]], dim=1)
        expected = reference(q[i], *pool.request(i, length + num_window), visible)
        torch.testing.assert_close(out[i].double(), expected, atol=1e-5, rtol=0)


def test_without_a_tree_the_window_is_a_chain() -> None:
    torch.manual_seed(0)
    pool = Pool([12, 25], 1)
    q = torch.randn(2, 5, HEADS, 3, DIM)
    chain = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 5, 5)
    seq_lens = torch.tensor([7, 20])
    torch.testing.assert_close(
        pool.attend(q, seq_lens, None), pool.attend(q, seq_lens, chain), atol=0, rtol=0
    )


@pytest.mark.parametrize("lengths", [[20], [20, 11]])
def test_only_visible_keys_matter(lengths: list[int]) -> None:
    torch.manual_seed(1)
    num_window = 6
    pool = Pool([n + num_window for n in lengths], 1)
    q = torch.randn(len(lengths), num_window, HEADS, 3, DIM)
    trees = torch.stack([random_tree(num_window) for _ in lengths])
    seq_lens = torch.tensor(lengths)
    before = pool.attend(q, seq_lens, trees)
    for request, length in enumerate(lengths):
        for node in range(num_window):
            slot = int(pool.table[pool.rows[request], length + node])
            kept = pool.v[slot].clone()
            pool.v[slot] += 10.0
            changed = (pool.attend(q, seq_lens, trees) - before).abs().amax(dim=(2, 3, 4)) > 1e-3
            pool.v[slot] = kept
            expected = torch.zeros_like(changed)
            expected[request] = trees[request, :, node]
            assert torch.equal(changed, expected)


def test_what_lies_beyond_a_request_is_never_read() -> None:
    torch.manual_seed(2)
    pool = Pool([9, 30], 1)
    pool.v[pool.table[pool.rows[0], 9:].long()] = math.nan
    pool.k[pool.table[pool.rows[0], 9:].long()] = math.inf
    own = pool.table[pool.rows[1], :30].long()
    pool.k[own], pool.v[own] = torch.randn(30, HEADS, DIM), torch.randn(30, HEADS, DIM)
    own = pool.table[pool.rows[0], :9].long()
    pool.k[own], pool.v[own] = torch.randn(9, HEADS, DIM), torch.randn(9, HEADS, DIM)
    pool.k[0] = pool.v[0] = 0.0  # the padding slot
    out = pool.attend(torch.randn(2, 1, HEADS, 1, DIM), torch.tensor([8, 29]), None)
    assert out.isfinite().all()


def test_a_row_that_sees_nothing_is_zero_not_nan() -> None:
    pool = Pool([4, 9], 1)
    trees = torch.zeros(2, 4, 4, dtype=torch.bool)
    out = pool.attend(torch.randn(2, 4, HEADS, 1, DIM), torch.tensor([0, 5]), trees)
    assert out.isfinite().all()
    assert (out[0] == 0).all()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("block", [8, 512])
def test_prefill_with_and_without_prefix_equals_the_reference(
    page_size: int, group: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "EXTEND_BLOCK", block)
    torch.manual_seed(block)
    prefix, new = [0, 19, 1, 40, 0], [7, 8, 1, 21, 1]
    pool = Pool([p + n for p, n in zip(prefix, new, strict=True)], page_size)
    q = torch.randn(sum(new), HEADS, group, DIM)
    parts = [pool.request(i, p + n) for i, (p, n) in enumerate(zip(prefix, new, strict=True))]
    k = torch.cat([keys[p:] for (keys, _), p in zip(parts, prefix, strict=True)])
    v = torch.cat([values[p:] for (_, values), p in zip(parts, prefix, strict=True)])
    plan = plan_extend(pool.table, pool.rows, prefix, new)
    out = attend_extend(plan, q, k, v, pool.k, pool.v, SCALE, LowerRightMask())
    for part, (keys, values) in zip(plan, parts, strict=True):
        context = part.num_prefix + part.num_new
        visible = torch.ones(part.num_new, context, dtype=torch.bool).tril(part.num_prefix)
        span = slice(part.start, part.start + part.num_new)
        expected = reference(q[span], keys, values, visible)
        torch.testing.assert_close(out[span].double(), expected, atol=1e-5, rtol=0)


def test_contiguous_slots_are_read_without_a_gather() -> None:
    table = torch.zeros(2, 64, dtype=torch.int32)
    table[1, :20] = torch.arange(100, 120)
    (bucket,) = plan_window(table, torch.tensor([1]), torch.tensor([19]), None, [1])
    assert bucket.slots == slice(100, 120)
    assert bucket.mask is None


def test_buckets_hold_every_request_once_and_split_only_where_it_pays() -> None:
    assert split_requests([5, 5, 6, 4], [1] * 4) == [[2, 0, 1, 3]]
    lengths = [30, 2000, 1990, 25, 28, 31]
    assert split_requests(lengths, [3] * 6) == [[1, 2], [5, 0, 4, 3]]
    assert split_requests([200, 300, 210, 250], [1, 8, 1, 1]) == [[3, 2, 0], [1]]
    assert split_requests([20, 30, 21, 25], [1, 8, 1, 1]) == [[1, 3, 2, 0]]  # too short to pay
    assert split_requests([200, 300], [1, 2]) == [[1, 0]]  # a narrow tree


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_nodes", [[1, 7, 1, 1, 4], [1, 2, 7, 1, 1], [7, 7, 7, 7, 7]])
def test_dead_rows_are_neither_computed_nor_seen(group: int, num_nodes: list[int]) -> None:
    torch.manual_seed(3)
    lengths, num_window = [400, 380, 390, 20, 410], 7
    pool = Pool([n + num_window for n in lengths], 1)
    q = torch.randn(len(lengths), num_window, HEADS, group, DIM)
    trees = torch.stack([random_tree(num_window) for _ in lengths])
    for i, live in enumerate(num_nodes):
        q[i, live:] = math.nan
        dead = pool.table[pool.rows[i], lengths[i] + live : lengths[i] + num_window].long()
        pool.k[dead] = pool.v[dead] = 0.0  # masked, but read: finite, like SGLang's own
        trees[i, :live, live:] = False
    out = pool.attend(q, torch.tensor(lengths), trees, num_nodes)
    for i, (length, live) in enumerate(zip(lengths, num_nodes, strict=True)):
        visible = torch.cat(
            [torch.ones(live, length, dtype=torch.bool), trees[i, :live, :live]], dim=1
        )
        expected = reference(q[i, :live], *pool.request(i, length + live), visible)
        torch.testing.assert_close(out[i, :live].double(), expected, atol=1e-5, rtol=0)
