"""The autoregressive form: one draft per pass, fed by the last one's hidden state.

An input is (embedding of a token, features of the token before it); without features yet, the
head's own hidden state stands in (EAGLE-3, arXiv 2503.01840; KVShot, 2604.26412, for the sources
kv and hybrid). Deviation: both halves enter the residual stream through one projection to D, as
in DeepSeek-V3's MTP (2412.19437), so that every layer has the target's shapes. `extra_norms` is
Attention Drift's post-norm (2605.09992). Letters: B sequences, Q inputs, P earlier inputs,
R context tokens, *T token axes, *S any axes, D hidden size, G KV heads, C head size,
W draft vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specstack.models.heads.base import DraftHead, normal_parameter, start_module, tapped_hidden
from specstack.models.heads.config import HeadConfig
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.layers import DraftLayer, LayerKV
from specstack.models.heads.sources import GatedLayer, TapFusion, target_views
from specstack.models.heads.tables import TargetTables
from specstack.models.heads.vocabulary import DraftVocabulary


class AutoregressiveHead(DraftHead):
    """Drafts token by token."""

    def __init__(
        self,
        config: HeadConfig,
        tables: TargetTables,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Raises HeadError if tables or vocabulary do not fit the config."""
        assert config.form == "autoregressive", config.form
        super().__init__(config, tables, vocabulary)
        hidden, eps = config.target.hidden_size, config.target.rms_norm_eps
        source = config.context.source
        self.embedding_norm = nn.RMSNorm(hidden, eps=eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.is_gated = source == "hybrid"
        kind = GatedLayer if self.is_gated else DraftLayer
        self.layers = nn.ModuleList(kind(config) for _ in range(config.num_layers))
        self.recurrent_norm = nn.RMSNorm(hidden, eps=eps) if config.extra_norms else nn.Identity()
        if source == "kv":
            self.start_hidden = normal_parameter(hidden)
        else:
            self.fusion = TapFusion(config)
        self.target_kv = target_views(config)
        start_module(self, tables)

    @property
    def num_cache_heads(self) -> int:
        """KV heads of `own` and `prefix`: G, or 2 G with gated_delta."""
        return self.config.target.num_kv_heads * (2 if self.is_gated else 1)

    def fuse(self, features: TargetFeatures) -> Float[Tensor, "*T D"]:
        """The features' half of the input; for the source kv a learned vector at every token."""
        if self.config.context.source != "kv":
            return self.fusion(tapped_hidden(features))
        if features.keys is None:
            raise ValueError("this head reads the target's keys and values; the features have none")
        return self.start_hidden.expand(*features.keys.shape[:-3], -1)

    def context(
        self, features: TargetFeatures, positions: Int[Tensor, "*T"]
    ) -> list[LayerKV] | None:
        """KV of verified tokens per layer, [*T G C]; None for the source hidden."""
        if not self.target_kv:
            return None
        rotation = self.rotary(positions)
        return [target_kv(features, rotation) for target_kv in self.target_kv]

    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q D"],
        positions: Int[Tensor, "B Q"],
        prefix: list[LayerKV] | None,
        context: list[LayerKV] | None,
        mask: Bool[Tensor, "B Q R+P+Q"],
        self_mask: Bool[Tensor, "B Q P+Q"] | None = None,
    ) -> tuple[Float[Tensor, "B Q D"], list[LayerKV]]:
        """Return the hidden states (for `logits` and as the next `hidden`) and own KV per layer.

        Host sync: none.

        Args:
            tokens: target ids, each the token after the one that `hidden` describes.
            positions: of `tokens`.
            prefix: own KV of earlier inputs, [B P G C] (2 G heads with gated_delta); None: P = 0.
            context: of `context`, [B R G C]; None for the source hidden, R = 0.
            mask: columns: context, prefix, these inputs. Where there is a context it stands for
                the verified tokens, and only drafts are seen in prefix and inputs.
            self_mask: gated_delta only: what its self-attention sees.
        """
        if (self_mask is not None) != self.is_gated:
            raise ValueError("self_mask is for gated_delta heads, which need it; others have one")
        if (context is None) != (not self.target_kv):
            raise ValueError(
                f"context.source {self.config.context.source} and a context "
                f"{'given' if context is not None else 'missing'}"
            )
        embedded = self.embedding_norm(self.embed(tokens))
        x = self.input_proj(torch.cat([embedded, hidden], dim=-1))
        rotation = self.rotary(positions)
        owns: list[LayerKV] = []
        for i, layer in enumerate(self.layers):
            before = prefix[i] if prefix else None
            layer_context = context[i] if context else None
            x, own = layer(x, rotation, layer_context, before, mask, self_mask)
            owns.append(own)
        return self.recurrent_norm(x), owns

    def logits(self, hidden: Float[Tensor, "*S D"]) -> Float[Tensor, "*S W"]:
        """Logits over the draft vocabulary."""
        return self.lm_head(self.norm(hidden))
