"""The contract of a verification rule: walk the tree with the target's distributions."""

from __future__ import annotations

from typing import Protocol

from specstack.types import AcceptResult, DraftTree, NodeLogits, SamplingTensors


class VerifyRule(Protocol):
    """Accepts a path of the tree so that what is emitted follows the target's law."""

    def accept(
        self,
        tree: DraftTree,
        logits: NodeLogits,
        sampling: SamplingTensors,
        *,
        max_depth: int,
    ) -> AcceptResult:
        """Return the accepted path per request.

        Args:
            logits: the target's, with penalties, biases and grammar masks already applied.
            max_depth: deepest node of any tree; K = max_depth + 1.
        """
