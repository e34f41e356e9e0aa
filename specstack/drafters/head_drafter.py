"""What drafters with a head share: the checkpoint, what it needs, its vocabulary.

Letters: W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from specstack.drafters.base import DraftRuntime, FeatureDrafter, FeatureNeeds
from specstack.drafters.choice import Best, Choice, Drawn
from specstack.drafters.expansion import Expander, expand
from specstack.drafters.search import make_search
from specstack.head_facts import local_folder
from specstack.models.heads.checkpoint import Head, load_head, read_head_config
from specstack.types import DraftBatch, DraftProposal


class HeadDrafter(FeatureDrafter):
    """A drafter whose candidates come from a head; `attach` loads it."""

    def __init__(
        self,
        checkpoint: str,
        max_depth: int,
        search: Mapping[str, Any] | None = None,
        drafts: str = "best",
    ) -> None:
        """Read the checkpoint's config.

        Args:
            checkpoint: folder or Hugging Face id, as planned; an id is downloaded if need be.
            max_depth: longest proposed path.
            search: of `make_search`, as the tree needs it; None: the best paths.
            drafts: `drawn` at random, for rules that divide p by q, or the `best`.

        Raises:
            HeadError: there is no head.
        """
        if max_depth < 1:
            raise ValueError(f"max_depth must be at least 1, got {max_depth}")
        self._folder = Path(local_folder(checkpoint))
        self.config = read_head_config(self._folder)
        self.needs = FeatureNeeds(self.config.context.target_layers, self.config.context.kv_layers)
        self._max_depth = max_depth
        self.search = make_search(**(search or {}))
        self.draws = drafts == "drawn"
        if self.draws and not self.search.is_fixed:
            # Choosing among drawn drafts would spoil the law that p is divided by.
            raise ValueError(f"drawn drafts need a search of fixed shape, got {search}")
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

    def choice(self, batch: DraftBatch, draft_budget: int) -> Choice:
        """Chooses as many children per node as a proposal for this budget can need."""
        width = self.search.width(draft_budget)
        return Drawn.of(batch, width) if self.draws else Best(width)

    def expand(self, expander: Expander, draft_budget: int) -> DraftProposal:
        """The candidates that the tree needs. Host sync: none."""
        return expand(expander, self.search, self._max_depth, draft_budget)
