"""What a round shows about its drafts, and where the end of the text cuts it.

A text has `num_left` tokens after the root. A draft that continues all of them is neither right
nor wrong: nobody knows what would follow. Letters: B requests, K path width, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack.types import AcceptResult, DraftTree


@dataclass(frozen=True)
class Observed:
    """The drafts of one round that were right, whether the text went on or not."""

    accept_index: Int[Tensor, "B K"]
    """Right nodes, root first, -1 pad."""
    num_right: Int[Tensor, " B"]
    is_cut: Bool[Tensor, " B"]
    """Everything that was left of the text was drafted right: deeper drafts say nothing."""

    def is_right(self, tree: DraftTree) -> Bool[Tensor, "B N"]:
        """Nodes whose whole path is right, the root included."""
        right = torch.zeros(len(tree.tokens), tree.num_draft_tokens + 1, dtype=torch.bool)
        nodes = self.accept_index.cpu()
        right.scatter_(1, torch.where(nodes < 0, tree.num_draft_tokens, nodes), True)
        return right[:, :-1]

    def is_unknown(self, tree: DraftTree) -> Bool[Tensor, "B N"]:
        """Nodes that continue the end of the text."""
        last = self.accept_index.gather(1, self.num_right[:, None])  # [B, 1]
        continues = tree.tree_mask.gather(
            2, last[..., None].expand(-1, tree.num_draft_tokens, 1).to(tree.tokens.device)
        )[..., 0]
        node = torch.arange(tree.num_draft_tokens, device=tree.tokens.device)
        is_below = continues & (node != last) & self.is_cut[:, None]
        return is_below.cpu()


def cut_at_end(
    accepted: AcceptResult, num_left: Int[Tensor, " B"]
) -> tuple[AcceptResult, Observed]:
    """Emit no more than is left: a draft at the end of the text becomes the bonus token."""
    column = torch.arange(accepted.accept_index.shape[1], device=num_left.device)
    num_right = torch.minimum(accepted.num_correct_drafts, num_left)
    observed = Observed(
        accepted.accept_index.masked_fill(column > num_right[:, None], -1),
        num_right.long(),
        accepted.num_correct_drafts >= num_left,
    )
    lens = torch.minimum(accepted.accept_lens, num_left)
    beyond = column >= lens[:, None]
    return (
        replace(
            accepted,
            accept_index=accepted.accept_index.masked_fill(beyond, -1),
            accept_lens=lens,
            emitted=accepted.emitted.masked_fill(beyond, 0),
        ),
        observed,
    )
