"""The typical rule: accept drafts that the target finds likely enough. The output's law changes.

The definition and its source: `specstack_kernels.reference.accept_typical`.
"""

from __future__ import annotations

from specstack.types import AcceptResult, DraftTree, NodeLogits, SamplingTensors
from specstack.verify.greedy import GreedyRule
from specstack_kernels.ops import accept_typical


class TypicalRule:
    """Exact for greedy requests alone."""

    def __init__(self, epsilon: float, delta: float) -> None:
        """Accept a draft x where p(x) >= min(epsilon, delta exp(-H(p)))."""
        self._epsilon, self._delta = epsilon, delta
        self._greedy = GreedyRule()

    def accept(
        self,
        tree: DraftTree,
        logits: NodeLogits,
        sampling: SamplingTensors,
        *,
        max_depth: int,
    ) -> AcceptResult:
        """Return the accepted path per request. Host sync: none."""
        if sampling.is_all_greedy:
            return self._greedy.accept(tree, logits, sampling, max_depth=max_depth)
        walk = accept_typical(
            tree.tokens,
            tree.parent_index,
            tree.num_nodes,
            logits.values,
            logits.rows,
            *sampling.filters,
            sampling.uniforms,
            max_depth=max_depth,
            epsilon=self._epsilon,
            delta=self._delta,
            use_top_k_top_p=sampling.use_top_k_top_p,
        )
        return AcceptResult(*walk)
