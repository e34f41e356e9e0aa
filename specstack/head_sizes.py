"""How many numbers a draft head holds: weights, and keys and values per token.

Counted from its config as `specstack.models.heads` builds it; a test compares the two.
"""

from __future__ import annotations

from specstack.models.heads.config import HeadConfig


def head_parameters(config: HeadConfig) -> int:
    """Weights, and the lm_head rows of a reduced draft vocabulary, which are copied."""
    hidden, context = config.target.hidden_size, config.context
    layers = config.num_layers * _layer(config)
    total = layers + hidden + (config.draft_vocab_size or 0) * hidden
    if context.source != "hidden":
        total += config.num_layers * _target_view(config)
    if context.source != "kv":
        taps = len(context.target_layers)
        total += taps * hidden + taps * hidden * hidden + hidden
    is_seeded = config.slots == "seeded"
    if config.form == "autoregressive" or is_seeded:
        total += hidden + 2 * hidden * hidden  # the embedding's norm, the input projection
    if config.form == "block":
        num_masks = max(config.num_slots - 1, 1) if is_seeded else 1
        return total + num_masks * hidden + _corrector(config)
    total += hidden if config.extra_norms else 0
    return total + (hidden if context.source == "kv" else 0)


def kv_values_per_token(config: HeadConfig) -> int:
    """Keys and values that a drafter keeps per token of the target's KV cache."""
    heads = config.target.num_kv_heads
    if config.form == "autoregressive":
        own = 2 if config.context.source == "hybrid" else 1
        heads *= own + (config.context.source != "hidden")
    return 2 * config.num_layers * heads * config.target.head_dim


def _attention(config: HeadConfig) -> int:
    target = config.target
    heads = 2 * target.num_heads + 2 * target.num_kv_heads
    norms = 2 * target.head_dim if target.qk_norm else 0
    return heads * target.head_dim * target.hidden_size + norms


def _layer(config: HeadConfig) -> int:
    hidden = config.target.hidden_size
    total = _attention(config) + 2 * hidden + 3 * hidden * config.intermediate_size
    if config.context.fusion == "gated_delta":
        total += _attention(config) + 3 * hidden * hidden + hidden + hidden * hidden
    if config.context.fusion == "sum":
        width = config.target.num_kv_heads * config.target.head_dim
        total += 2 * (2 * width * config.context.sum_rank or width)
    return total


def _target_view(config: HeadConfig) -> int:
    if config.context.kv_mix == "paired":
        return 0
    width = config.target.num_kv_heads * config.target.head_dim
    return 2 * len(config.context.kv_layers) * width * width


def _corrector(config: HeadConfig) -> int:
    conditioning, target = config.conditioning, config.target
    if conditioning.kind not in ("markov", "gru"):
        return 0
    rank, hidden = conditioning.rank, target.hidden_size
    table = conditioning.parent == "table"
    total = target.vocab_size * rank if table else hidden + hidden * rank
    by_logits = conditioning.output == "logits"
    total += rank * ((config.draft_vocab_size or target.vocab_size) if by_logits else hidden)
    return total + (6 * rank * rank + 6 * rank if conditioning.kind == "gru" else 0)
