"""Recursive rejection over a drawn tree: the definition.

The drafts of a node were drawn one after the other, without replacement, from a law q of the
drafter, in node order. They are offered to the target in that order: draft c is taken with chance
min(1, p(c) / q(c)); if it is refused, p becomes norm((p - q)+) and q loses c. When all are refused
a token is drawn from what is left of p. Averaged over the drafts, the emitted tokens are plain
samples of p. Chains: Leviathan et al., arXiv 2211.17192, algorithm 1; several children: SpecInfer,
arXiv 2305.09781, and Sequoia, arXiv 2402.12374.

One uniform per visited node: a refusal of chance a leaves (u - a) / (1 - a), uniform again. This
moves no probability by more than the spacing of the uniforms, as a refusal is as rare as it
stretches them.

Where numbers run out:
- a draft with q = 0 was not drawn from q: it is not offered, and neither is what lies beyond
  `max_children`. If the token drawn from what is left of p is such a draft, the walk goes on there,
  as in `sample_and_walk`, which this op equals if `max_children` is 0;
- q and p are divided by their sums before they are compared, so neither need add up to 1 exactly;
- where (p - q)+ is zero everywhere, p equals q up to rounding, and the draft is taken.

Letters: B requests, N nodes, C candidates of a law, V vocabulary, K path width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.reference.accept_greedy import find_child
from specstack_kernels.reference.filter_probs import filter_probs
from specstack_kernels.reference.sample_and_walk import invert_cdf
from specstack_kernels.types import Walk

LAST_UNIFORM = 1.0 - 2.0**-53
"""Largest float64 below 1: rounding may lift no uniform to 1, also not where it was made."""


def accept_rejection(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    law_tokens: Int[Tensor, "B N C"],
    law_probs: Float[Tensor, "B N C"],
    logits: Float[Tensor, "T V"],
    logit_rows: Int[Tensor, "B N"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    uniforms: Float[Tensor, "B K"],
    *,
    max_depth: int,
    max_children: int,
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1.

    Args:
        law_tokens: distinct in a node that has children, any ids below V in others.
        law_probs: q of each candidate; anything in nodes without children.
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first; no law and no uniform counts.
        max_children: most children that are offered at a node; 1 does for chains.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    batch = draft_tokens.shape[0]
    accept_index = draft_tokens.new_full((batch, max_depth + 1), -1)
    emitted = draft_tokens.new_zeros((batch, max_depth + 1))
    accept_lens = draft_tokens.new_zeros(batch)
    for b in range(batch):
        settings = [setting[b : b + 1] for setting in (temperature, top_k, top_p, min_p)]
        node = 0
        for step in range(max_depth + 1):
            visited = logits[logit_rows[b, node]].float()  # [V]
            if top_k[b] == 1:
                token = int(visited.argmax())
            else:
                token = take_token(
                    filter_probs(visited[None], *settings, use_top_k_top_p=use_top_k_top_p)[0],
                    law_over_vocabulary(law_tokens[b, node], law_probs[b, node], len(visited)),
                    children_of(node, draft_tokens[b], parent_index[b], int(num_nodes[b]))[
                        :max_children
                    ],
                    min(float(uniforms[b, step]), LAST_UNIFORM),
                )
            accept_index[b, step] = node
            emitted[b, step] = token
            accept_lens[b] = step + 1
            child = find_child(draft_tokens[b], parent_index[b], int(num_nodes[b]), node, token)
            if child == -1:
                break
            node = child
    return Walk(accept_index, accept_lens, emitted)


def take_token(
    p: Float[Tensor, " V"], q: Float[Tensor, " V"], children: list[int], uniform: float
) -> int:
    """Return the first child that is taken, or else a token of what is left of p."""
    p = p.double()
    q = q.double()
    for token in children:
        if q[token] == 0:
            continue
        p = p / p.sum()
        q = q / q.sum()
        left = (p - q).clamp(min=0)
        chance = min(1.0, float(p[token] / q[token])) if left.sum() > 0 else 1.0
        if uniform < chance:
            return token
        uniform = min((uniform - chance) / (1 - chance), LAST_UNIFORM)
        p = left
        q[token] = 0.0
    return invert_cdf(p, uniform)


def law_over_vocabulary(
    tokens: Int[Tensor, " C"], probs: Float[Tensor, " C"], vocab: int
) -> Float[Tensor, " V"]:
    """Return q of every token, as float64."""
    law = torch.zeros(vocab, dtype=torch.float64)
    law[tokens] = probs.double()
    return law


def children_of(
    node: int, draft_tokens: Int[Tensor, " N"], parent_index: Int[Tensor, " N"], num_nodes: int
) -> list[int]:
    """Return the tokens of the live children of `node`, in node order."""
    live = range(1, num_nodes)
    return [int(draft_tokens[child]) for child in live if int(parent_index[child]) == node]
