"""The adapter to FlashInfer's attention, through FlashInfer's own wrapper, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from specstack_kernels import ops
from specstack_kernels.flashinfer.tree_attention import (
    TreeAttention,
    TreeAttentionSizes,
    _page_table,
)
from specstack_kernels.reference.draft_attention import draft_attention as reference
from specstack_kernels.testing_attention import AttentionShape, random_attention

SHAPE = AttentionShape(3, 5, 21, 6, 2, 64)
WORKSPACE = torch.zeros(1024, dtype=torch.uint8)


def adapter(shape=SHAPE, scale=None):
    sizes = TreeAttentionSizes(
        shape.batch, shape.queries, shape.columns, shape.heads, shape.kv_heads, shape.head_dim
    )
    return TreeAttention(sizes, shape.dtype, torch.device("cpu"), scale=scale, workspace=WORKSPACE)


def step(shape, seed=0, mask="tree", seq_lens=None):
    """Inputs, the slots of the block, and pools that hold the block."""
    inputs = random_attention(shape, seed, mask, seq_lens)
    inputs = inputs._replace(
        keys=inputs.keys.nan_to_num(nan=0), values=inputs.values.nan_to_num(nan=0)
    )
    first, num_own = len(inputs.pool_keys), shape.batch * shape.queries
    block_slots = first + torch.randperm(num_own).view(shape.batch, shape.queries)
    pool = torch.stack([inputs.pool_keys, inputs.pool_values], dim=1)
    pool = torch.cat([pool, torch.zeros(num_own, *pool.shape[1:], dtype=pool.dtype)])
    pool[block_slots] = torch.stack([inputs.keys, inputs.values], dim=2)
    return inputs, block_slots, pool.unbind(1)


def plan(attention, inputs, block_slots):
    attention.plan(
        inputs.kv_slots, inputs.seq_lens, block_slots, inputs.mask,
        seq_lens_cpu=inputs.seq_lens.tolist(),
    )  # fmt: skip


def assert_close(actual, expected):
    # Both compute in float64 and round once.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2.0**-23 * 4)


@pytest.mark.parametrize("mask", ["tree", "full", "random"])
@pytest.mark.parametrize("seq_lens", [[21, 0, 1], [20, 13, 8], [3, 3, 3]], ids=str)
def test_a_step_equals_the_definition(flashinfer_on_host, mask, seq_lens):
    inputs, block_slots, pools = step(SHAPE, mask=mask, seq_lens=seq_lens)
    attention = adapter(scale=0.2)
    plan(attention, inputs, block_slots)
    output = attention.run(inputs.queries, *pools)
    assert_close(output, reference(*inputs, scale=0.2))


def test_one_plan_serves_all_layers_and_the_next_plan_keeps_the_buffers(flashinfer_on_host):
    attention = adapter()
    buffers = [name for name in vars(attention._wrapper) if name.endswith("_buf")]
    assert len(buffers) == 6
    before = {name: getattr(attention._wrapper, name).data_ptr() for name in buffers}
    for seed, seq_lens in enumerate([[21, 20, 19], [2, 0, 5]]):
        inputs, block_slots, pools = step(SHAPE, seed, seq_lens=seq_lens)
        plan(attention, inputs, block_slots)
        for layer in range(2):
            queries = inputs.queries + layer
            expected = reference(*inputs._replace(queries=queries))
            assert_close(attention.run(queries, *pools), expected)
    assert before == {name: getattr(attention._wrapper, name).data_ptr() for name in buffers}


def test_flashinfers_own_definition_agrees_with_ours():
    """Its torch reference of paged prefill, which is causal, against ours with a causal mask."""
    from flashinfer.trace.templates.attention import gqa_paged_prefill_trace

    inputs, block_slots, (keys, values) = step(SHAPE, mask="full", seq_lens=[21, 0, 6])
    inputs = inputs._replace(mask=inputs.mask.tril())
    table = _page_table(inputs.kv_slots, inputs.seq_lens, block_slots, num_entries=42)
    output, _ = gqa_paged_prefill_trace.reference(
        inputs.queries.flatten(0, 1), keys[:, None], values[:, None],
        torch.arange(4) * SHAPE.queries, torch.tensor([0, 26, 31, 42]), table, 0.125,
    )  # fmt: skip
    expected = reference(*inputs)
    # It rounds to bfloat16, by half a unit in the last of 8 bits.
    largest = float(expected.abs().max())
    torch.testing.assert_close(
        output.float().view(expected.shape), expected, rtol=0, atol=largest * 2.0**-8
    )


def test_keys_and_values_share_their_strides(flashinfer_on_host):
    """Otherwise FlashInfer builds a second kernel."""
    _, _, (keys, values) = step(SHAPE)
    assert keys.stride() == values.stride()
    assert not keys.is_contiguous()


def test_what_the_planner_gets(flashinfer_on_host):
    """Host tensors of 32 bits, and every size; its order is that of FlashInfer's C++ `plan`."""
    inputs, block_slots, _ = step(SHAPE, seq_lens=[21, 0, 6])
    plan(adapter(), inputs, block_slots)
    (args,) = flashinfer_on_host.plans
    indptr, pages, lengths = args[3:6]
    assert [x.dtype for x in (indptr, pages, lengths)] == [torch.int32] * 3
    assert indptr.tolist() == [0, 5, 10, 15]
    assert pages.tolist() == [0, 26, 31, 42]
    assert lengths.tolist() == [26, 5, 11]
    rows, batch, heads, kv_heads, page_size, is_graph, head_dim, _, is_causal, window = args[6:16]
    assert (rows, batch, heads, kv_heads, page_size) == (15, 3, 6, 2, 1)
    assert (is_graph, head_dim, is_causal, window) == (True, 64, False, -1)


def test_one_request_and_one_query(flashinfer_on_host):
    shape = AttentionShape(1, 1, 7, 4, 4, 64)
    inputs, block_slots, pools = step(shape)
    attention = adapter(shape)
    plan(attention, inputs, block_slots)
    assert_close(attention.run(inputs.queries, *pools), reference(*inputs))


def test_a_prefix_beyond_the_buffers_is_refused(flashinfer_on_host):
    inputs, block_slots, _ = step(SHAPE)
    with pytest.raises(ValueError, match="a prefix of 22 tokens, at most 21"):
        adapter().plan(
            inputs.kv_slots, inputs.seq_lens, block_slots, inputs.mask, seq_lens_cpu=[22, 1, 1]
        )


def test_a_mask_beyond_32_bits_is_refused():
    sizes = TreeAttentionSizes(256, 256, 1 << 18, 8, 8, 64)
    with pytest.raises(ValueError, match="32-bit offsets"):
        TreeAttention(sizes, torch.float16, torch.device("cpu"))


def test_packing_equals_what_flashinfer_packs_itself(flashinfer_on_host):
    """The same plan with the bool mask: same bytes, same offsets."""
    inputs, block_slots, _ = step(SHAPE, seq_lens=[21, 0, 6])
    ours, theirs = adapter(), adapter()
    plan(ours, inputs, block_slots)
    tree = ops.pack_tree_mask(inputs.mask, inputs.seq_lens, num_tokens=27)
    pages = inputs.seq_lens + SHAPE.queries
    theirs._wrapper.plan(
        torch.arange(4, dtype=torch.int32) * SHAPE.queries,
        torch.cat([torch.zeros(1, dtype=torch.int64), pages.cumsum(0)]).to(torch.int32),
        torch.zeros(int(pages.sum()), dtype=torch.int32),
        torch.ones(3, dtype=torch.int32),
        SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim, 1, custom_mask=tree.full,
    )  # fmt: skip
    for name in ("_custom_mask_buf", "_mask_indptr_buf"):
        assert torch.equal(getattr(ours._wrapper, name), getattr(theirs._wrapper, name))


def test_offsets_in_flags_would_read_the_wrong_bits(flashinfer_on_host):
    """What FlashInfer leaves beside a packed mask; if this fails, the adapter need not mend it."""
    inputs, block_slots, pools = step(SHAPE, mask="random", seq_lens=[21, 20, 19])
    attention = adapter()
    plan(attention, inputs, block_slots)
    in_bytes = attention._byte_offsets.clone()
    flags = SHAPE.queries * (inputs.seq_lens + SHAPE.queries)
    assert in_bytes[1:].tolist() == ((flags + 7) // 8).cumsum(0).tolist()
    attention._byte_offsets.copy_ = lambda *args: None  # type: ignore[method-assign]
    attention._wrapper._mask_indptr_buf = torch.zeros_like(in_bytes)
    plan(attention, inputs, block_slots)
    left = attention._wrapper._mask_indptr_buf
    assert left[1:].tolist() == flags.cumsum(0).tolist()
    assert not torch.equal(left, in_bytes)
    # Room for what is read beyond the end.
    attention._wrapper._custom_mask_buf = pad(attention._wrapper._custom_mask_buf, (0, 1 << 10))
    wrong = attention.run(inputs.queries, *pools)
    assert_close(wrong[0], reference(*inputs)[0])
    with pytest.raises(AssertionError):
        assert_close(wrong, reference(*inputs))
