"""The block form: all slots of a draft in one pass (DFlash, arXiv 2602.06036; JetFlow, 2606.18394).

Features of verified tokens are injected as keys and values of every layer; queries come from the
block alone: [anchor, MASK, ..]. Deviation: fused features pass a layer's own input norm before
its k_proj and v_proj, as the target's hidden states would, so that layers can start as copies of
the target's. The same module scores real tokens under a tree mask (`conditioning.kind: refresh`).

`slots: masked` is the papers' block: slot k predicts the token k places after the anchor and knows
anchor and features through attention alone, 2 G C numbers per layer. `seeded` (ours, for heads of
one or two layers) gives every slot the fused features of the last verified token in its residual
stream, as an autoregressive head has them, and a MASK of its own; slot k predicts the token k + 1
places after the anchor, so that the first draft sees the anchor itself.

Letters: B sequences, Q slots, M MASK vectors, P context tokens, *T token axes, *S any axes,
D hidden size, G KV heads, C head size, R rank, V vocabulary, W draft vocabulary, K path length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specstack.models.heads.base import DraftHead, normal_parameter, start_module, tapped_hidden
from specstack.models.heads.conditioning import make_corrector
from specstack.models.heads.config import HeadConfig
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.layers import DraftLayer, LayerKV, PagedKV
from specstack.models.heads.sources import KvSum, TapFusion, target_views
from specstack.models.heads.tables import TargetTables
from specstack.models.heads.vocabulary import DraftVocabulary


class BlockHead(DraftHead):
    """Drafts a block in one pass."""

    def __init__(
        self,
        config: HeadConfig,
        tables: TargetTables,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Raises HeadError if tables or vocabulary do not fit the config."""
        assert config.form == "block", config.form
        super().__init__(config, tables, vocabulary)
        source, layers = config.context.source, range(config.num_layers)
        hidden, self.is_seeded = config.target.hidden_size, config.slots == "seeded"
        num_masks = config.num_slots - 1 if self.is_seeded else 1
        self.mask_embedding = normal_parameter(max(num_masks, 1), hidden)
        """[M D]"""
        if self.is_seeded:
            self.embedding_norm = nn.RMSNorm(hidden, eps=config.target.rms_norm_eps)
            self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in layers)
        self.fusion = TapFusion(config) if source != "kv" else None
        self.target_kv = target_views(config)
        self.kv_sum = nn.ModuleList(KvSum(config) for _ in layers if source == "hybrid")
        self.corrector = make_corrector(config)
        start_module(self, tables)

    def fuse(self, features: TargetFeatures) -> Float[Tensor, "*T D"] | None:
        """The tapped hidden states as one vector; None for the source kv."""
        return None if self.fusion is None else self.fusion(tapped_hidden(features))

    def context(
        self,
        features: TargetFeatures,
        positions: Int[Tensor, "*T"],
        fused: Float[Tensor, "*T D"] | None = None,
    ) -> list[LayerKV]:
        """KV of verified tokens per layer, [*T G C]; token by token, no attention.

        Args:
            fused: of `fuse`, where the caller has it already.
        """
        rotation = self.rotary(positions)
        target = [view(features, rotation) for view in self.target_kv]
        if fused is None:
            fused = self.fuse(features)
        if fused is None:
            return target
        own = [cast(DraftLayer, x).context_kv(fused, rotation) for x in self.layers]
        if not target:
            return own
        pairs = zip(self.kv_sum, own, target, strict=True)
        return [add(derived, tapped, rotation) for add, derived, tapped in pairs]

    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        positions: Int[Tensor, "B Q"],
        context: Sequence[LayerKV | PagedKV],
        mask: Bool[Tensor, "B Q P+Q"],
        seed: Float[Tensor, "B Q D"] | None = None,
    ) -> Float[Tensor, "B Q D"]:
        """Return the slots' final hidden states, for `logits`. Host sync: none.

        Args:
            tokens: target ids; negative where the token is not known, -k in slot k.
            context: of `context`, [B P G C], or where a pool keeps it (P = 0 then).
            seed: of `fuse`, of the token before each slot's anchor; for seeded slots only.
        """
        if (seed is not None) != self.is_seeded:
            raise ValueError("seed is for seeded slots, which need it")
        masks = self.mask_embedding[(-1 - tokens).clamp(0, len(self.mask_embedding) - 1)]
        x = torch.where((tokens < 0)[..., None], masks, self.embed(tokens.clamp(min=0)))
        if seed is not None:
            x = self.input_proj(torch.cat([self.embedding_norm(x), seed], dim=-1))
        rotation = self.rotary(positions)
        for layer, layer_context in zip(self.layers, context, strict=True):
            x, _ = layer(x, rotation, layer_context, None, mask, None)
        return self.norm(x)

    def logits(
        self,
        hidden: Float[Tensor, "*S D"],
        parents: Int[Tensor, "*S"] | None = None,
        state: Float[Tensor, "*S R"] | None = None,
    ) -> Float[Tensor, "*S W"]:
        """Logits over the draft vocabulary.

        Args:
            parents: target id of the token before each slot; None leaves the corrector out.
            state: of `advance`, the path before the parent; None if the parent is the anchor.
                Only a GRU reads it.
        """
        if parents is None or self.corrector is None:
            return self.lm_head(hidden)
        correction = self.corrector.up(self.advance(parents, state))
        if self.config.conditioning.output == "hidden":
            return self.lm_head(hidden + correction)
        return self.lm_head(hidden) + correction

    def advance(
        self, tokens: Int[Tensor, "*S"], state: Float[Tensor, "*S R"] | None = None
    ) -> Float[Tensor, "*S R"]:
        """The corrector's state after `tokens`, given the one before them."""
        if self.corrector is None:
            raise ValueError(f"conditioning.kind {self.config.conditioning.kind} has no state")
        return self.corrector.advance(tokens, state, self.embedding)

    def path_states(self, tokens: Int[Tensor, "*S K"]) -> Float[Tensor, "*S K R"]:
        """The state before each token of paths that start at the anchor: zeros, then `advance`.

        `logits(hidden, tokens, path_states(tokens))` corrects whole paths at once.
        """
        rank = self.config.conditioning.rank
        states = [self.embedding.new_zeros(*tokens.shape[:-1], rank)]
        for k in range(tokens.shape[-1] - 1):
            states.append(self.advance(tokens[..., k], states[-1]))
        return torch.stack(states, dim=-2)


def block_tokens(anchors: Int[Tensor, "*S"], num_slots: int) -> Int[Tensor, "*S Q"]:
    """The tokens of blocks: [anchor, MASK 1, MASK 2, ..]."""
    masks = -torch.arange(1, num_slots, device=anchors.device)
    return torch.cat([anchors[..., None], masks.expand(*anchors.shape, -1)], dim=-1)
