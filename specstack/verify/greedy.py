"""The greedy rule: accept the path of the target's argmax, emit one argmax beyond it."""

from __future__ import annotations

from specstack.types import AcceptResult, DraftTree, NodeLogits, SamplingTensors
from specstack_kernels.ops import accept_greedy


class GreedyRule:
    """Exact for greedy requests; refuses batches with sampled ones."""

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
            ValueError: if a request samples: this rule would silently change its law.
        """
        if not sampling.is_all_greedy:
            raise ValueError(
                "verify rule 'greedy' got a request with temperature > 0; "
                "use 'sample_and_walk' or refuse such requests on arrival"
            )
        walk = accept_greedy(
            tree.tokens,
            tree.parent_index,
            tree.num_nodes,
            # max: on the CPU 3 times as fast as argmax
            logits.values.max(dim=-1).indices[logits.rows],
            max_depth=max_depth,
        )
        return AcceptResult(*walk)
