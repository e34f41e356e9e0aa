"""Attention over the KV pool in plain torch: decode and tree verification batched over requests.

The slots to gather and the mask depend on the batch only, so they are built once per forward
(`plan_window`, `plan_extend`) and reused by every layer. The query heads that share a KV head
become additional query rows of it: nothing is expanded.

Letters: B requests, N query tokens per request (1 in decode, the tree's nodes in verification),
b requests of one bucket, n its query rows per request, L its longest context, H KV heads,
G query heads per KV head, D head size, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

# A bucket more costs one gather and one attention call per layer, about as much as this many
# context tokens of one request.
BUCKET_COST_TOKENS = 300
# What a further query row costs per context token, against gathering and attending with one.
ROW_COST = 0.1
# Rows of a prefill chunk per attention call: bounds the mask and skips what no row can see.
EXTEND_BLOCK = 512


@dataclass
class Bucket:
    """Similar requests that share one gather and one attention call per layer."""

    requests: Int[Tensor, " b"] | None
    """Their positions in the batch; None when the bucket is the whole batch in order."""
    num_rows: int
    """Query rows of each (n): the first n of the window, beyond which all of theirs are dead."""
    slots: slice | Int[Tensor, "b L"]
    """KV rows to read; a slice, which needs no gather, where one request's rows are contiguous."""
    mask: Float[Tensor, "b 1 n L"] | None
    """0 where visible and -inf elsewhere; None when every request sees all of its L rows."""
    _grouped: dict[int, Tensor] = field(default_factory=dict)

    def grouped_mask(self, group: int) -> Tensor | None:
        """The mask for G * n query rows per KV head, G slowest."""
        if self.mask is None or self.mask.shape[2] == 1 or group == 1:
            return self.mask
        if group not in self._grouped:
            self._grouped[group] = self.mask.repeat(1, 1, group, 1)
        return self._grouped[group]


@dataclass(frozen=True)
class Extension:
    """One request of a prefill: its rows in the packed batch and the KV rows before them."""

    start: int
    num_new: int
    num_prefix: int
    slots: slice | Int[Tensor, " L"] | None
    """KV rows of prefix and chunk; None without a prefix, when the layer's k and v suffice."""


def split_requests(lengths: Sequence[int], num_nodes: Sequence[int]) -> list[list[int]]:
    """Group requests so that neither long contexts nor wide trees are padding for many others."""
    everyone = range(len(lengths))
    roots = [i for i in everyone if num_nodes[i] == 1]
    saved = ROW_COST * (max(num_nodes) - 1) * sum(lengths[i] for i in roots)
    if len(roots) == len(lengths) or saved <= BUCKET_COST_TOKENS:
        return _split_by_length(lengths, everyone)
    trees = [i for i in everyone if num_nodes[i] > 1]
    return _split_by_length(lengths, roots) + _split_by_length(lengths, trees)


def _split_by_length(lengths: Sequence[int], requests: Sequence[int]) -> list[list[int]]:
    """Longest first; a group ends where padding would cost more than a call."""
    order = sorted(requests, key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    longest = 0
    for position, request in enumerate(order):
        saved = (longest - lengths[request]) * (len(order) - position)
        if not buckets or saved > BUCKET_COST_TOKENS:
            buckets.append([])
            longest = lengths[request]
        buckets[-1].append(request)
    return buckets


def contiguous(slots: Int[Tensor, " L"]) -> slice | Int[Tensor, " L"]:
    """`slots` as a slice when they ascend one by one."""
    first, count = int(slots[0]), slots.numel()
    if torch.equal(slots, torch.arange(first, first + count, dtype=slots.dtype)):
        return slice(first, first + count)
    return slots


def plan_window(
    req_to_token: Int[Tensor, "R W"],
    req_pool_indices: Int[Tensor, " B"],
    seq_lens: Int[Tensor, " B"],
    tree_mask: Bool[Tensor, "B N N"] | None,
    num_nodes: Sequence[int],
) -> list[Bucket]:
    """Buckets for each request's first `num_nodes` tokens behind `seq_lens` committed ones.

    `tree_mask` None means the causal chain.
    """
    rows, committed = req_pool_indices.long(), seq_lens.long()
    groups = split_requests(committed.tolist(), num_nodes)
    if len(groups) == 1:
        return [_plan_bucket(req_to_token, None, rows, committed, tree_mask, max(num_nodes))]
    buckets = []
    for group in groups:
        index, width = torch.tensor(group), max(num_nodes[i] for i in group)
        trees = None if tree_mask is None else tree_mask[index, :width, :width]
        buckets.append(
            _plan_bucket(req_to_token, index, rows[index], committed[index], trees, width)
        )
    return buckets


def _plan_bucket(
    req_to_token: Int[Tensor, "R W"],
    requests: Int[Tensor, " b"] | None,
    rows: Int[Tensor, " b"],
    seq_lens: Int[Tensor, " b"],
    tree_mask: Bool[Tensor, "b n n"] | None,
    num_rows: int,
) -> Bucket:
    lengths = seq_lens + num_rows
    longest = int(lengths.max())
    slots = req_to_token[rows, :longest].long()  # [b, L]
    mask = None
    if num_rows > 1 or int(lengths.min()) < longest:
        mask = window_mask(seq_lens, tree_mask, num_rows, longest)
    if rows.numel() == 1:
        found = contiguous(slots[0])
        return Bucket(requests, num_rows, found if isinstance(found, slice) else slots, mask)
    # Slot 0 is SGLang's own padding and stays finite; stale entries may point at anything.
    padding = torch.arange(longest) >= lengths[:, None]
    return Bucket(requests, num_rows, slots.masked_fill_(padding, 0), mask)


def window_mask(
    seq_lens: Int[Tensor, " b"],
    tree_mask: Bool[Tensor, "b n n"] | None,
    num_rows: int,
    longest: int,
) -> Float[Tensor, "b 1 n L"]:
    """Every node sees the committed tokens and, within the window, what the tree lets it see."""
    shape = (seq_lens.numel(), num_rows, longest)
    visible = (torch.arange(longest) < seq_lens[:, None])[:, None, :].repeat(1, num_rows, 1)
    if tree_mask is None:
        tree_mask = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    columns = (seq_lens[:, None] + torch.arange(num_rows))[:, None, :]
    trees = tree_mask.expand(shape[0], num_rows, num_rows)
    visible.scatter_(2, columns.expand(trees.shape), trees)
    return torch.zeros(shape).masked_fill_(~visible, float("-inf"))[:, None]


def plan_extend(
    req_to_token: Int[Tensor, "R W"],
    req_pool_indices: Int[Tensor, " B"],
    num_prefix: Sequence[int],
    num_new: Sequence[int],
) -> list[Extension]:
    """One entry per request of a prefill batch."""
    plan, start = [], 0
    for row, prefix, new in zip(req_pool_indices.tolist(), num_prefix, num_new, strict=True):
        slots = contiguous(req_to_token[row, : prefix + new].long()) if prefix else None
        plan.append(Extension(start, new, prefix, slots))
        start += new
    return plan


def attend_window(
    buckets: list[Bucket],
    q: Float[Tensor, "B N H G D"],
    k_buffer: Float[Tensor, "S H D"],
    v_buffer: Float[Tensor, "S H D"],
    scale: float,
) -> Float[Tensor, "B N H G D"]:
    """Attention of every bucket, one call each; dead rows are left undefined."""
    out = None if buckets[0].requests is None else torch.empty_like(q)
    for bucket in buckets:
        queries = q if bucket.requests is None else q[bucket.requests, : bucket.num_rows]
        size, num_rows, heads, group, dim = queries.shape
        rows = queries.permute(0, 2, 3, 1, 4).reshape(size, heads, group * num_rows, dim)
        result = scaled_dot_product_attention(
            rows,
            read_rows(k_buffer, bucket.slots, size).transpose(1, 2),
            read_rows(v_buffer, bucket.slots, size).transpose(1, 2),
            attn_mask=bucket.grouped_mask(group),
            scale=scale,
        )
        result = result.view(size, heads, group, num_rows, dim).permute(0, 3, 1, 2, 4)
        if bucket.requests is None:
            return result
        assert out is not None
        out[bucket.requests, : bucket.num_rows] = result
    assert out is not None
    return out


def read_rows(
    buffer: Float[Tensor, "S H D"], slots: slice | Tensor, size: int
) -> Float[Tensor, "b L H D"]:
    """The KV rows of a bucket: a view of one request's contiguous rows, else a gather."""
    if isinstance(slots, slice):
        return buffer[slots][None]
    # An embedding look-up copies whole rows; indexing walks single elements.
    rows = embedding(slots, buffer.view(buffer.shape[0], -1))
    return rows.view(size, -1, *buffer.shape[1:])


class LowerRightMask:
    """Causal masks of rows at the end of their context, all views of one growing tensor."""

    def __init__(self) -> None:
        self._base = torch.empty(EXTEND_BLOCK, 0)

    def __call__(self, rows: int, context: int) -> Float[Tensor, "rows context"]:
        """Row i of `rows` (at most EXTEND_BLOCK) sees the first context - rows + i + 1 columns."""
        before = self._base.shape[1] - EXTEND_BLOCK
        if context - rows > before:
            before = 2 * (context - rows)
            triangle = torch.full((EXTEND_BLOCK, EXTEND_BLOCK), float("-inf")).triu(1)
            self._base = torch.cat([torch.zeros(EXTEND_BLOCK, before), triangle], dim=1)
        return self._base[:rows, before + rows - context : before + rows]


def attend_extend(
    plan: list[Extension],
    q: Float[Tensor, "T H G D"],
    k: Float[Tensor, "T H D"],
    v: Float[Tensor, "T H D"],
    k_buffer: Float[Tensor, "S H D"],
    v_buffer: Float[Tensor, "S H D"],
    scale: float,
    causal_mask: LowerRightMask,
) -> Float[Tensor, "T H G D"]:
    """Causal attention of each request's new tokens over its prefix and themselves."""
    out = torch.empty_like(q)
    for part in plan:
        end = part.start + part.num_new
        queries = q[part.start : end].permute(1, 2, 0, 3)  # [H, G, new, D]
        if part.slots is None:
            keys, values = k[part.start : end], v[part.start : end]
        else:
            keys = read_rows(k_buffer, part.slots, 1)[0]
            values = read_rows(v_buffer, part.slots, 1)[0]
        # KV heads play the batch, so that one KV head serves its G heads through a zero stride.
        keys = keys.transpose(0, 1)[:, None].expand(-1, queries.shape[1], -1, -1)
        values = values.transpose(0, 1)[:, None].expand(-1, queries.shape[1], -1, -1)
        target = out[part.start : end].permute(1, 2, 0, 3)
        if part.slots is None:
            target.copy_(
                scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
            )
            continue
        for first in range(0, part.num_new, EXTEND_BLOCK):
            last = min(first + EXTEND_BLOCK, part.num_new)
            context = part.num_prefix + last
            target[:, :, first:last] = scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, :context],
                values[:, :, :context],
                attn_mask=causal_mask(last - first, context),
                scale=scale,
            )
    return out
