"""What drafters with a head share: the checkpoint, what it needs, its vocabulary.

Letters: W draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from specstack.drafters.base import DraftRuntime, FeatureDrafter, FeatureNeeds
from specstack.head_facts import local_folder
from specstack.models.heads.checkpoint import Head, load_head, read_head_config


class HeadDrafter(FeatureDrafter):
    """A drafter whose candidates come from a head; `attach` loads it."""

    def __init__(self, checkpoint: str, max_depth: int, width: int | None) -> None:
        """Read the checkpoint's config.

        Args:
            checkpoint: folder or Hugging Face id, as planned; an id is downloaded if need be.
            max_depth: longest proposed path.
            width: most children of a node; None: as many as the draft budget.

        Raises:
            HeadError: there is no head.
        """
        if max_depth < 1 or (width is not None and width < 1):
            raise ValueError(f"max_depth and width must be at least 1, got {max_depth} and {width}")
        self._folder = Path(local_folder(checkpoint))
        self.config = read_head_config(self._folder)
        self.needs = FeatureNeeds(self.config.context.target_layers, self.config.context.kv_layers)
        self._max_depth = max_depth
        self._width = width
        self._token_ids: Int[Tensor, " W"] | None = None
        """Target ids of the draft vocabulary; None: all tokens are drafted."""

    def load(self, runtime: DraftRuntime) -> Head:
        """Load the head for this target; raises HeadError where they do not fit."""
        head = load_head(self._folder, runtime.tables.to(device=runtime.device), runtime.dtype)
        if head.vocabulary is not None:
            self._token_ids = head.vocabulary.token_ids
        head.requires_grad_(False).eval()
        if runtime.prepare is not None:
            runtime.prepare(head)
        return head

    def num_children(self, draft_budget: int) -> int:
        """Children per node that a proposal for this budget can need."""
        return draft_budget if self._width is None else min(self._width, draft_budget)
