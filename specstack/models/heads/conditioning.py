"""Path correctors: logits of a block's slot given the tokens before it, without attention.

`MarkovCorrector` reads the parent token alone: base + up(f(parent)), low rank (DSpark, arXiv
2607.05147, with `parent: table` and `output: logits`); `GruCorrector` reads the whole path (after
Domino, 2605.29707). Ours: parents may enter through the target's embedding, and the correction
may go through the target's lm_head, which needs 2 D rank weights instead of (V + W) rank. Both
start without effect. Letters: *S any axes, V vocabulary, W draft vocabulary, D hidden size,
R rank.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from specstack.models.heads.config import HeadConfig


class _ParentTable(nn.Module):
    """R learned numbers per token."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.target.vocab_size, config.conditioning.rank)

    def forward(
        self, parents: Int[Tensor, "*S"], embedding: Float[Tensor, "V D"]
    ) -> Float[Tensor, "*S R"]:
        return self.table(parents)


class _ParentProjection(nn.Module):
    """The token's embedding in the target, normalised, projected, SiLU."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden = config.target.hidden_size
        self.norm = nn.RMSNorm(hidden, eps=config.target.rms_norm_eps)
        self.down = nn.Linear(hidden, config.conditioning.rank, bias=False)

    def forward(
        self, parents: Int[Tensor, "*S"], embedding: Float[Tensor, "V D"]
    ) -> Float[Tensor, "*S R"]:
        return F.silu(self.down(self.norm(F.embedding(parents, embedding))))


class MarkovCorrector(nn.Module):
    """The state of a path is that of its last token."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        by_table = config.conditioning.parent == "table"
        self.parent = _ParentTable(config) if by_table else _ParentProjection(config)
        width = config.target.hidden_size
        if config.conditioning.output == "logits":
            width = config.draft_vocab_size or config.target.vocab_size
        self.up = nn.Linear(config.conditioning.rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def advance(
        self,
        parents: Int[Tensor, "*S"],
        state: Float[Tensor, "*S R"] | None,
        embedding: Float[Tensor, "V D"],
    ) -> Float[Tensor, "*S R"]:
        """The state after `parents` (target ids), given the one before (None: the start)."""
        return self.parent(parents, embedding)


class GruCorrector(MarkovCorrector):
    """The state of a path is a GRU's."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.cell = nn.GRUCell(config.conditioning.rank, config.conditioning.rank)

    def advance(
        self,
        parents: Int[Tensor, "*S"],
        state: Float[Tensor, "*S R"] | None,
        embedding: Float[Tensor, "V D"],
    ) -> Float[Tensor, "*S R"]:
        read = self.parent(parents, embedding)
        rank = read.shape[-1]
        before = None if state is None else state.reshape(-1, rank)
        return self.cell(read.reshape(-1, rank), before).view_as(read)


def make_corrector(config: HeadConfig) -> MarkovCorrector | None:
    """The corrector of the config; None for `none` and `refresh`, which needs no module."""
    kinds = {"markov": MarkovCorrector, "gru": GruCorrector}
    kind = kinds.get(config.conditioning.kind)
    return kind(config) if kind else None
