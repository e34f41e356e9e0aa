"""The frozen target of an evaluation: its features of whole texts, and whether texts are its own.

Letters: B texts, L tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from specstack.drafters.base import FeatureNeeds
from specstack.evaluation.known_texts import KnownText
from specstack.models import packaged
from specstack.models.heads.config import ContextConfig
from specstack.models.heads.features import TargetFeatures
from specstack.plan import Plan
from specstack.training.run_config import Target
from specstack.training.target_model import FrozenTarget
from specstack_dsl.parts.target import PACKAGED_PREFIX

NOTHING = FeatureNeeds((), ())
_LOGIT_ROWS = 512


def load_target(plan: Plan, dtype: str, device: torch.device) -> FrozenTarget:
    """Load a plan's target; a packaged one is prepared first.

    Raises:
        ModelError: a packaged model cannot be had.
    """
    model, path = plan.target.model, plan.target.path
    if model.startswith(PACKAGED_PREFIX):
        path = str(packaged.ensure(model.removeprefix(PACKAGED_PREFIX)))
    options = Target.model_validate({"model": model, "dtype": dtype})
    return FrozenTarget(path, options, device)


def look_at(
    target: FrozenTarget, texts: Sequence[KnownText], needs: FeatureNeeds, device: torch.device
) -> tuple[TargetFeatures, torch.Tensor]:
    """Features [B L ..] and the states [B L D] before the lm_head, padded at their ends."""
    rows = [torch.tensor(text.tokens, device=device) for text in texts]
    tokens = pad_sequence(rows, batch_first=True)
    source = "hybrid" if needs.target_layers and needs.kv_layers else (
        "kv" if needs.kv_layers else "hidden"
    )  # fmt: skip
    layers = {"target_layers": needs.target_layers, "kv_layers": needs.kv_layers}
    seen = target.features(tokens, ContextConfig.model_validate({"source": source, **layers}))
    return seen.features, seen.final


def num_greedy(text: KnownText, final: torch.Tensor, lm_head: torch.Tensor) -> int:
    """Tokens of the answer up to the first that is not the target's best. Host sync.

    Args:
        final: [L D], the text's states before the lm_head.
    """
    start = len(text.prompt) - 1
    states = final[start : start + len(text.output)]
    for first in range(0, len(states), _LOGIT_ROWS):
        rows = states[first : first + _LOGIT_ROWS]
        best = F.linear(rows.to(lm_head.dtype), lm_head).argmax(-1).tolist()
        for i, token in enumerate(best, first):
            if token != text.output[i]:
                return i
    return len(text.output)
