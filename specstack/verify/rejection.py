"""The rejection rule: offer the drafts that were drawn to the target, one after the other.

Exact at any temperature where drafts were drawn from `tree.law` and where nothing that was drawn
decided which of them are verified (non-anticipation). The definition and its sources:
`specstack_kernels.reference.accept_rejection`.
"""

from __future__ import annotations

from specstack.types import AcceptResult, DraftTree, NodeLogits, SamplingTensors
from specstack.verify.sample_and_walk import SampleAndWalkRule
from specstack_kernels.ops import accept_rejection


class RejectionRule:
    """Exact for greedy, sampled and mixed batches of drawn trees."""

    def __init__(self) -> None:
        self._undrafted = SampleAndWalkRule()

    def accept(
        self,
        tree: DraftTree,
        logits: NodeLogits,
        sampling: SamplingTensors,
        *,
        max_depth: int,
    ) -> AcceptResult:
        """Return the accepted path per request. Host sync: none.

        All children of a node are offered. Only the device knows how many there are: the host
        bounds them by the nodes, and stops early on the CPU, where it sees when none is left.

        Raises:
            ValueError: if a request samples and its drafts were not drawn from a law.
        """
        if sampling.is_all_greedy or tree.num_draft_tokens == 1:
            return self._undrafted.accept(tree, logits, sampling, max_depth=max_depth)
        if tree.law is None:
            raise ValueError(
                "verify rule 'rejection' got drafts that were not drawn at random; "
                "use a drafter with `drafts: drawn`, or 'sample_and_walk'"
            )
        walk = accept_rejection(
            tree.tokens,
            tree.parent_index,
            tree.num_nodes,
            tree.law.tokens,
            tree.law.probs,
            logits.values,
            logits.rows,
            *sampling.filters,
            sampling.uniforms,
            max_depth=max_depth,
            max_children=tree.num_draft_tokens - 1,
            use_top_k_top_p=sampling.use_top_k_top_p,
        )
        return AcceptResult(*walk)
