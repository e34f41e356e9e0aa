"""The verify batch in SGLang's terms: window slots, masks, carried state.

Letters: B requests, N tree nodes, T computed nodes of all requests, K path width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack.types import DraftTree
from specstack_kernels.ops import pack_tree_mask
from specstack_serving import sglang_compat as sgl


class DraftState(sgl.SpecInput):  # type: ignore[misc]
    """What a request carries between rounds: its bonus token, relayed by the scheduler."""

    topk_p = None
    topk_index = None
    hidden_states = None
    draft_probs = None
    future_indices: Tensor | None = None
    num_tokens_per_req = 1
    num_tokens_for_logprob_per_req = 1

    def __init__(self, bonus_tokens: Tensor, new_seq_lens: Tensor) -> None:
        super().__init__(sgl.SpecInputType.DFLASH_DRAFT)
        self.bonus_tokens = bonus_tokens
        self.new_seq_lens = new_seq_lens

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: Any = None) -> None:
        """Keep the requests at `new_indices`."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: DraftState) -> None:
        """Append the requests of `other`."""
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


class PackedNodes(NamedTuple):
    """Which nodes a verify step computes."""

    computed: Int[Tensor, " T"] | None
    """Nodes as b * N + n, ascending; None when every node is computed."""
    rows: Int[Tensor, "B N"]
    """Row of each node among the computed ones; dead nodes name their root's."""


class TreeVerifyInput(sgl.EagleVerifyInput):  # type: ignore[misc]
    """A verify window that holds an irregular tree."""

    computed_nodes: Tensor | None = None
    """`PackedNodes.computed`; the other rows of the window are not in the batch."""
    node_rows: Tensor | None = None
    """`PackedNodes.rows`, flat."""

    @property
    def tree_topk(self) -> int:
        """-1: no fixed branching per level."""
        return -1

    @property
    def max_tree_depth(self) -> int:
        """Nodes of the longest path, root included."""
        return int(self.spec_steps) + 1


def window_slots(batch: Any, num_draft_tokens: int) -> Int[Tensor, "B N"]:
    """KV slots of the verify window: the N that follow each request's committed tokens."""
    columns = torch.arange(num_draft_tokens, device=batch.seq_lens.device)
    columns = batch.seq_lens.to(torch.int64)[:, None] + columns
    rows = batch.req_pool_indices.to(torch.int64)[:, None]
    return batch.req_to_token_pool.req_to_token[rows, columns].to(torch.int64)


def pack_nodes(tree: DraftTree, *, ragged: bool) -> PackedNodes:
    """Choose the nodes to compute: all of them, or the live ones where shapes may vary.

    Host sync: none, unless `ragged`.
    """
    batch, num_nodes = tree.tokens.shape
    rows = torch.arange(batch * num_nodes, device=tree.tokens.device).view(batch, num_nodes)
    if not ragged or num_nodes == 1:  # a root lives
        return PackedNodes(None, rows)
    is_live = torch.arange(num_nodes, device=rows.device) < tree.num_nodes[:, None]
    computed = is_live.reshape(-1).nonzero()[:, 0]
    if len(computed) == rows.numel():
        return PackedNodes(None, rows)
    order = is_live.reshape(-1).cumsum(0).view(batch, num_nodes) - 1
    return PackedNodes(computed, torch.where(is_live, order, order[:, :1]))


def verify_batch(
    batch: Any,
    model_runner: Any,
    tree: DraftTree,
    window: Int[Tensor, "B N"],
    packed: PackedNodes,
    *,
    window_mask: bool,
    capture_hidden_mode: Any,
) -> Any:
    """Turn `batch` into a TARGET_VERIFY forward over the trees.

    Mutates the batch; the scheduler restores its fields after the round.

    Args:
        window_mask: the attention backend reads the mask of the window alone (specstack_cpu).
    """
    positions = batch.seq_lens.to(torch.int64)[:, None] + tree.depth
    verify_input = TreeVerifyInput(
        draft_token=_computed(tree.tokens, packed),
        custom_mask=(
            tree.tree_mask.reshape(-1) if window_mask else _full_mask(batch, tree.tree_mask)
        ),
        positions=_computed(positions, packed),
        retrieve_index=None,
        retrieve_next_token=tree.retrieve_next_token,
        retrieve_next_sibling=tree.retrieve_next_sibling,
        retrieve_cum_len=None,
        spec_steps=tree.num_draft_tokens - 1,
        topk=1 if tree.num_draft_tokens == 1 else 2,
        draft_token_num=tree.num_draft_tokens,
        capture_hidden_mode=capture_hidden_mode,
        seq_lens_sum=None,
        seq_lens_cpu=batch.seq_lens_cpu,
    )
    verify_input.computed_nodes, verify_input.node_rows = packed.computed, packed.rows.flatten()
    batch.input_ids = verify_input.draft_token
    batch.out_cache_loc = _computed(window, packed)
    batch.spec_info = verify_input
    batch.forward_mode = sgl.ForwardMode.TARGET_VERIFY
    return sgl.ForwardBatch.init_new(
        batch,
        model_runner,
        capture_hidden_mode=capture_hidden_mode,
        return_hidden_states_before_norm=False,
    )


def _computed(nodes: Int[Tensor, "B N"], packed: PackedNodes) -> Int[Tensor, " T"]:
    flat = nodes.reshape(-1)
    return flat if packed.computed is None else flat[packed.computed]


def _full_mask(batch: Any, tree_mask: Bool[Tensor, "B N N"]) -> Bool[Tensor, " T"]:
    """SGLang's FULL_MASK: per node a row of `seq_len + N`, requests one after another."""
    num_tokens = int(batch.seq_lens_cpu.sum())
    return pack_tree_mask(tree_mask, batch.seq_lens, num_tokens=num_tokens).full
