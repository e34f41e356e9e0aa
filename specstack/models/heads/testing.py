"""Heads of a few thousand weights, and features for them: for tests.

The target has qk-norm, grouped heads and a head size that is not hidden size / heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specstack.models.heads.config import HeadConfig
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.tables import TargetTables

TARGET: dict[str, Any] = {
    "name": "tiny",
    "hidden_size": 24,
    "num_layers": 6,
    "vocab_size": 40,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "qk_norm": True,
}
HIDDEN = {"source": "hidden", "target_layers": (1, 3, 5)}
KV = {"source": "kv", "kv_layers": (2, 4), "kv_mix": "paired"}
KV_LINEAR = {"source": "kv", "kv_layers": (0, 2, 4), "kv_mix": "linear"}
KV_DEROTATED = {**KV_LINEAR, "kv_mix": "linear_derotated"}
SUM = {**KV, "source": "hybrid", "target_layers": (1, 3, 5), "fusion": "sum"}
SUM_LOW_RANK = {**SUM, "sum_rank": 3}
GATED = {**SUM, "fusion": "gated_delta"}
GATED_LINEAR = {**GATED, "kv_layers": (0, 2, 4), "kv_mix": "linear"}


def tiny_config(
    form: str = "block", context: dict[str, Any] | None = None, **fields: Any
) -> HeadConfig:
    """A config of two layers; `target` takes changes of `TARGET`."""
    target = {**TARGET, **fields.pop("target", {})}
    plain = {"num_layers": 2, "block_size": 4, "intermediate_size": 20}
    described = {**plain, "form": form, "context": context or HIDDEN, "target": target, **fields}
    return HeadConfig.model_validate(described)


def random_tables(config: HeadConfig, dtype: torch.dtype = torch.float64) -> TargetTables:
    """Two different tables."""
    size = (config.target.vocab_size, config.target.hidden_size)
    return TargetTables(torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype))


def random_features(
    config: HeadConfig, *tokens: int, dtype: torch.dtype = torch.float64
) -> TargetFeatures:
    """All that the config taps, of the given token axes; one seed means the same in any dtype."""
    context, target = config.context, config.target
    hidden = torch.randn(
        *tokens, len(context.target_layers), target.hidden_size, dtype=torch.float64
    )
    size = (*tokens, len(context.kv_layers), target.num_kv_heads, target.head_dim)
    keys, values = torch.randn(2, *size, dtype=torch.float64)
    reads_hidden, reads_kv = context.source != "kv", context.source != "hidden"
    return TargetFeatures(
        hidden if reads_hidden else None,
        keys if reads_kv else None,
        values if reads_kv else None,
    ).to(dtype=dtype)


def randomise(head: nn.Module, scale: float = 1.0) -> None:
    """Give every weight a value of its own, those that start at zero or one included."""
    with torch.no_grad():
        for parameter in head.parameters():
            width = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.add_(scale * torch.randn_like(parameter) / width**0.5)
