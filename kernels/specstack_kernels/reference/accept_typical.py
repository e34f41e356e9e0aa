"""Typical acceptance: the definition (Medusa, Cai et al., arXiv 2401.10774, section 2.3.1).

A draft x is accepted if the target finds it typical at its parent,

    p(x) >= min(epsilon, delta exp(-H(p))),

with H the entropy of p, and if all drafts above it are accepted. The deepest accepted draft ends
the path, the first in node order among equals; then a token is drawn from p there. What is emitted
does not follow p: a typical draft comes always, not with probability p(x).

Deviations: p is what the request samples from (temperature, top-k, top-p, min-p); no draft is
accepted unconditionally, as the last token is drawn from p. Letters: B requests, N nodes, V
vocabulary, K path width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.reference.filter_probs import filter_probs
from specstack_kernels.reference.sample_and_walk import invert_cdf
from specstack_kernels.types import Walk


def accept_typical(
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
    epsilon: float,
    delta: float,
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1.

    Args:
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: drafts that are the argmax of the logits, lowest id first, no others.
        uniforms: that of the depth of a path's end draws the token there.
        epsilon: a draft at least this probable is typical. 0: every draft is.
        delta: so is one of at least this share of exp(-H).
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    batch, nodes = draft_tokens.shape
    accept_index = draft_tokens.new_full((batch, max_depth + 1), -1)
    emitted = draft_tokens.new_zeros((batch, max_depth + 1))
    accept_lens = draft_tokens.new_zeros(batch)
    for b in range(batch):
        visited = logits[logit_rows[b]].float()  # [N, V]
        settings = [setting[b].expand(nodes) for setting in (temperature, top_k, top_p, min_p)]
        p = filter_probs(visited, *settings, use_top_k_top_p=use_top_k_top_p)
        paths = {0: [0]}
        """Of the accepted nodes."""
        best = 0
        for node in range(1, int(num_nodes[b])):
            parent, token = int(parent_index[b, node]), int(draft_tokens[b, node])
            if parent not in paths or len(paths[parent]) > max_depth:
                continue
            if top_k[b] == 1:
                is_typical = token == int(visited[parent].argmax())
            else:
                is_typical = float(p[parent, token]) >= threshold(p[parent], epsilon, delta)
            if is_typical:
                paths[node] = [*paths[parent], node]
                if len(paths[node]) > len(paths[best]):
                    best = node
        length = len(paths[best])
        accept_index[b, :length] = torch.tensor(paths[best])
        emitted[b, : length - 1] = draft_tokens[b, paths[best][1:]]
        if top_k[b] == 1:
            emitted[b, length - 1] = visited[best].argmax()
        else:
            emitted[b, length - 1] = invert_cdf(p[best], float(uniforms[b, length - 1]))
        accept_lens[b] = length
    return Walk(accept_index, accept_lens, emitted)


def threshold(p: Float[Tensor, " V"], epsilon: float, delta: float) -> float:
    """Return the least probability of a typical token."""
    entropy = float(torch.special.entr(p.double()).sum())
    return min(epsilon, delta * float(torch.exp(torch.tensor(-entropy))))
