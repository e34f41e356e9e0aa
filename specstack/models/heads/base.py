"""What both forms share: the target's tables, the draft vocabulary, positions, the last norm.

Letters: V vocabulary, W draft vocabulary, D hidden size, *S any axes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from specstack.models.heads.config import HeadConfig
from specstack.models.heads.errors import HeadError
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.layers import LayerKV
from specstack.models.heads.rotary import Rotary
from specstack.models.heads.tables import TargetTables
from specstack.models.heads.vocabulary import DraftVocabulary


class LmHead(nn.Module):
    """The target's lm_head for the draft vocabulary: frozen, and not in the state dict."""

    weight: Tensor

    def __init__(self, rows: Float[Tensor, "W D"]) -> None:
        super().__init__()
        self.register_buffer("weight", rows, persistent=False)

    def forward(self, hidden: Float[Tensor, "*S D"]) -> Float[Tensor, "*S W"]:
        """Return logits."""
        return F.linear(hidden, self.weight)


class DraftHead(nn.Module):
    """A head without its layers. The tables are buffers outside the state dict: frozen, unsaved.

    Device and dtype are the tables'; `to` moves all of it.
    """

    embedding: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: HeadConfig, tables: TargetTables, vocabulary: DraftVocabulary | None
    ) -> None:
        super().__init__()
        self.config = config
        _check_tables(config, tables, vocabulary)
        rows = tables.lm_head
        if vocabulary is not None:
            self.register_buffer("d2t", vocabulary.d2t)
            self.register_buffer("t2d", vocabulary.t2d)
            rows = rows[vocabulary.token_ids]
        self.register_buffer("embedding", tables.embedding, persistent=False)
        self.lm_head = LmHead(rows)
        self.rotary = Rotary(config.target)
        self.norm = nn.RMSNorm(config.target.hidden_size, eps=config.target.rms_norm_eps)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The reduced vocabulary; None drafts every token. Host sync: builds and checks it."""
        if self.config.draft_vocab_size is None:
            return None
        return DraftVocabulary(self.d2t, self.t2d)

    @property
    def num_cache_heads(self) -> int:
        """KV heads of what a layer keeps per token."""
        return self.config.target.num_kv_heads

    def embed(self, tokens: Int[Tensor, "*S"]) -> Float[Tensor, "*S D"]:
        """The target's embedding of target ids."""
        return F.embedding(tokens, self.embedding)

    def context(
        self, features: TargetFeatures, positions: Int[Tensor, "*T"]
    ) -> list[LayerKV] | None:
        """KV that draft layers read of verified tokens, per layer; token by token, no attention."""
        raise NotImplementedError


def _check_tables(
    config: HeadConfig, tables: TargetTables, vocabulary: DraftVocabulary | None
) -> None:
    target = config.target
    expected = (target.vocab_size, target.hidden_size)
    for name, table in (("embedding", tables.embedding), ("lm_head", tables.lm_head)):
        if table.shape != expected:
            found = " x ".join(map(str, table.shape))
            raise HeadError(
                f"the head drafts for {target.name} with {expected[0]} tokens of size "
                f"{expected[1]}; this target's {name} is {found}"
            )
    found_size = None if vocabulary is None else len(vocabulary.d2t)
    if found_size != config.draft_vocab_size:
        raise HeadError(
            f"the config has draft_vocab_size {config.draft_vocab_size}; "
            f"the vocabulary given has {found_size or 'no'} draft tokens"
        )
    if vocabulary is not None and len(vocabulary.t2d) != target.vocab_size:
        raise HeadError(
            f"{target.name} has {target.vocab_size} tokens; "
            f"the draft vocabulary was made for {len(vocabulary.t2d)}"
        )


def tapped_hidden(features: TargetFeatures) -> Tensor:
    """The hidden states, or ValueError."""
    if features.hidden is None:
        raise ValueError("this head reads the target's hidden states; the features have none")
    return features.hidden


def start_module(head: DraftHead, tables: TargetTables) -> None:
    """Bring what a constructor made to the device and dtype of the tables."""
    head.to(device=tables.embedding.device, dtype=tables.embedding.dtype)


def normal_parameter(*size: int) -> nn.Parameter:
    """Learned vectors that start small."""
    return nn.Parameter(torch.randn(*size) * 0.02)
