"""Random inputs of `draft_attention` for tests and benchmarks, NaN wherever nobody may look.

Letters: B requests, Q slots of the block, L context columns, S pool rows, n layers, H query heads,
G KV heads, C head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NUM_LAYERS = 3


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a call."""

    batch: int
    queries: int
    columns: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        sizes = f"B{self.batch} Q{self.queries} L{self.columns} H{self.heads} G{self.kv_heads}"
        return f"{sizes} C{self.head_dim} {kind}"


class AttentionInputs(NamedTuple):
    """The arguments of `draft_attention`, in its order."""

    queries: Float[Tensor, "B Q H C"]
    pool_keys: Float[Tensor, "S G C"]
    pool_values: Float[Tensor, "S G C"]
    kv_slots: Int[Tensor, "B L"]
    seq_lens: Int[Tensor, " B"]
    keys: Float[Tensor, "B Q G C"]
    values: Float[Tensor, "B Q G C"]
    mask: Bool[Tensor, "B Q Q"]


def random_attention(
    shape: AttentionShape,
    seed: int = 0,
    mask: Literal["tree", "full", "random"] = "tree",
    seq_lens: list[int] | None = None,
) -> AttentionInputs:
    """Return inputs over a pool that keeps all layers of a slot together, as `DraftPool` does.

    Request 0 uses all columns, the others any number, 0 included. NaN: pool rows that no request
    names, other layers, and block slots that no query sees.

    Args:
        mask: ancestors of a random tree; everybody; or anything, empty rows and columns included.
        seq_lens: instead of random ones.
    """
    random = torch.Generator().manual_seed(seed)
    batch, num_queries, num_columns = shape.batch, shape.queries, shape.columns

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(shape.dtype)

    if seq_lens is None:
        lengths = torch.randint(num_columns + 1, (batch,), generator=random)
        lengths[0] = num_columns
    else:
        lengths = torch.tensor(seq_lens)
    num_slots = batch * num_columns + 5
    kv_slots = torch.randperm(num_slots, generator=random)[: batch * num_columns]
    kv_slots = kv_slots.view(batch, num_columns)
    is_live = torch.arange(num_columns) < lengths[:, None]
    size = (num_slots, NUM_LAYERS, 2, shape.kv_heads, shape.head_dim)
    pool = torch.full(size, float("nan"), dtype=shape.dtype)
    live = kv_slots[is_live]
    pool[live, 1] = normal(len(live), 2, shape.kv_heads, shape.head_dim)
    sees = _random_mask(batch, num_queries, mask, random)
    is_unseen = ~sees.any(dim=1)
    own = (batch, num_queries, shape.kv_heads, shape.head_dim)
    return AttentionInputs(
        normal(batch, num_queries, shape.heads, shape.head_dim),
        pool[:, 1, 0],
        pool[:, 1, 1],
        kv_slots,
        lengths,
        normal(*own).masked_fill(is_unseen[..., None, None], float("nan")),
        normal(*own).masked_fill(is_unseen[..., None, None], float("nan")),
        sees,
    )


def _random_mask(batch: int, nodes: int, kind: str, random: torch.Generator) -> Tensor:
    if kind == "full":
        return torch.ones((batch, nodes, nodes), dtype=torch.bool)
    if kind == "random":
        return torch.rand((batch, nodes, nodes), generator=random) < 0.3
    mask = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    for node in range(1, nodes):
        parents = torch.randint(node, (batch,), generator=random)
        mask[:, node] |= mask[torch.arange(batch), parents]
    return mask


def largest_value(inputs: AttentionInputs) -> float:
    """The largest value that any query may see, which scales an output's rounding error."""
    values = [inputs.values, inputs.pool_values]
    return max(float(each.float().abs().nan_to_num().max()) for each in values if each.numel())
