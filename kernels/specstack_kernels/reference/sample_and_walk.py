"""Sample-and-walk verification: the definition.

At a node draw a token from the target's filtered distribution; if a child carries it go there,
else emit it and stop. The emitted tokens are plain samples of the target, whatever the tree, as
long as the tree does not depend on this round's uniforms (SpecInfer, arXiv 2305.09781, section
4.3, with a deterministic draft). One uniform per visited node, by the inverse of the CDF in
order of token id. Letters: B requests, N nodes, V vocabulary, K path width.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.reference.accept_greedy import find_child
from specstack_kernels.reference.filter_probs import filter_probs
from specstack_kernels.types import Walk


def sample_and_walk(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    logits: Float[Tensor, "T V"],
    logit_rows: Int[Tensor, "B N"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    uniforms: Float[Tensor, "B K"],
    *,
    max_depth: int,
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1.

    Args:
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first, and no uniform counts.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    batch = draft_tokens.shape[0]
    accept_index = draft_tokens.new_full((batch, max_depth + 1), -1)
    emitted = draft_tokens.new_zeros((batch, max_depth + 1))
    accept_lens = draft_tokens.new_zeros(batch)
    for b in range(batch):
        node_logits = logits[logit_rows[b]]  # [N, V]
        node_probs = filter_probs(
            node_logits.float(),
            *(
                setting[b].expand(len(node_logits))
                for setting in (temperature, top_k, top_p, min_p)
            ),
            use_top_k_top_p=use_top_k_top_p,
        )
        node = 0
        for step in range(max_depth + 1):
            if top_k[b] == 1:
                token = int(node_logits[node].argmax())
            else:
                token = invert_cdf(node_probs[node], float(uniforms[b, step]))
            accept_index[b, step] = node
            emitted[b, step] = token
            accept_lens[b] = step + 1
            child = find_child(draft_tokens[b], parent_index[b], int(num_nodes[b]), node, token)
            if child == -1:
                break
            node = child
    return Walk(accept_index, accept_lens, emitted)


def invert_cdf(probs: Float[Tensor, " V"], uniform: float) -> int:
    """Return the first token whose cumulative probability exceeds `uniform`."""
    target = uniform * float(probs.double().sum())
    mass = 0.0
    token = 0
    for v, p in enumerate(probs.double().tolist()):
        if p > 0:
            mass += p
            token = v
            if mass > target:
                break
    return token
