"""The block rule: judge the drafts of a chain together, which accepts no fewer than one by one.

Exact at any temperature for chains that were drawn from `tree.law` and whose length nothing drawn
beyond it decided (non-anticipation). The definition and its sources:
`specstack_kernels.reference.accept_block`.
"""

from __future__ import annotations

from specstack.types import AcceptResult, DraftTree, NodeLogits, SamplingTensors
from specstack.verify.sample_and_walk import SampleAndWalkRule
from specstack_kernels.ops import accept_block


class BlockRule:
    """Exact for greedy, sampled and mixed batches of drawn chains: node i continues node i - 1."""

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

        Raises:
            ValueError: if a request samples and its drafts were not drawn from a law.
        """
        if sampling.is_all_greedy or tree.num_draft_tokens == 1:
            return self._undrafted.accept(tree, logits, sampling, max_depth=max_depth)
        if tree.law is None:
            raise ValueError(
                "verify rule 'block' got drafts that were not drawn at random; "
                "use a drafter with `drafts: drawn`, or 'sample_and_walk'"
            )
        walk = accept_block(
            tree.tokens,
            tree.num_nodes,
            tree.law.tokens,
            tree.law.probs,
            logits.values,
            logits.rows,
            *sampling.filters,
            sampling.uniforms,
            max_depth=max_depth,
            use_top_k_top_p=sampling.use_top_k_top_p,
        )
        return AcceptResult(*walk)
