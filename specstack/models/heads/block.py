"""The block form: all slots of a draft in one pass (DFlash, arXiv 2602.06036; JetFlow, 2606.18394).

Features of verified tokens are injected as keys and values of every layer; queries come from the
block alone: [anchor, MASK, ..]. Slot k predicts the token k places after the anchor. Deviation:
fused features pass a layer's own input norm before its k_proj and v_proj, as the target's hidden
states would, so that layers can start as copies of the target's. The same module scores real
tokens under a tree mask (`conditioning.kind: refresh`). Letters: B sequences, Q slots, P context
tokens, *T token axes, *S any axes, D hidden size, G KV heads, C head size, R rank,
V vocabulary, W draft vocabulary, K path length.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from specstack.models.heads.base import DraftHead, normal_parameter, start_module, tapped_hidden
from specstack.models.heads.conditioning import make_corrector
from specstack.models.heads.config import HeadConfig
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.layers import DraftLayer, LayerKV
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
        self.mask_embedding = normal_parameter(config.target.hidden_size)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in layers)
        self.fusion = TapFusion(config) if source != "kv" else None
        self.target_kv = target_views(config)
        self.kv_sum = nn.ModuleList(KvSum(config) for _ in layers if source == "hybrid")
        self.corrector = make_corrector(config)
        start_module(self, tables)

    def context(self, features: TargetFeatures, positions: Int[Tensor, "*T"]) -> list[LayerKV]:
        """KV of verified tokens per layer, [*T G C]; token by token, no attention."""
        rotation = self.rotary(positions)
        target = [view(features, rotation) for view in self.target_kv]
        if self.fusion is None:
            return target
        fused = self.fusion(tapped_hidden(features))
        own = [cast(DraftLayer, x).context_kv(fused, rotation) for x in self.layers]
        if not target:
            return own
        pairs = zip(self.kv_sum, own, target, strict=True)
        return [add(derived, tapped, rotation) for add, derived, tapped in pairs]

    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        positions: Int[Tensor, "B Q"],
        context: list[LayerKV],
        mask: Bool[Tensor, "B Q P+Q"],
    ) -> Float[Tensor, "B Q D"]:
        """Return the slots' final hidden states, for `logits`. Host sync: none.

        Args:
            tokens: target ids; negative (`config.mask_token_id`) where the token is not known.
            context: of `context`, [B P G C].
        """
        known = self.embed(tokens.clamp(min=0))
        x = torch.where((tokens < 0)[..., None], self.mask_embedding, known)
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
            return F.linear(hidden, self.lm_head_rows)
        correction = self.corrector.up(self.advance(parents, state))
        if self.config.conditioning.output == "hidden":
            return F.linear(hidden + correction, self.lm_head_rows)
        return F.linear(hidden, self.lm_head_rows) + correction

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
