"""The sample-and-walk rule: sample the target at a node, follow the child that carries the token.

Exact at any temperature for every tree that is fixed before the uniforms are drawn (SpecInfer,
arXiv 2305.09781, section 4.3). The definition is `specstack_kernels.reference.sample_and_walk`.
"""

from __future__ import annotations

from specstack.types import AcceptResult, DraftTree, NodeLogits, SamplingTensors
from specstack.verify.greedy import GreedyRule
from specstack_kernels.ops import sample_and_walk


class SampleAndWalkRule:
    """Exact for greedy, sampled and mixed batches."""

    def __init__(self) -> None:
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
        walk = sample_and_walk(
            tree.tokens,
            tree.parent_index,
            tree.num_nodes,
            logits.values,
            logits.rows,
            *sampling.filters,
            sampling.uniforms,
            max_depth=max_depth,
            use_top_k_top_p=sampling.use_top_k_top_p,
        )
        return AcceptResult(*walk)
