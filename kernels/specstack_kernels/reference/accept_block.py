"""Block verification of a drawn chain: the definition (Sun et al., arXiv 2403.10444, algorithm 2).

Draft i was drawn from the law q of the node before it. The prefix of i drafts is kept with
probability k_i = min(1, k_{i-1} p(draft i) / q(draft i)), k_0 = 1: unlike token by token, a draft
that the target likes more than the drafter does makes up for one before it. A prefix is tested with
chance

    h_i = s_i / (s_i + 1 - k_i), where s_i is the sum of (k_i p - q)+ over the tokens after it,
    h_i = k_i for the whole chain,

and the longest one that passes is accepted. Then a token is drawn: from p after the whole chain,
else from norm((k_i p - q)+). Averaged over the drafts, the emitted tokens are plain samples of p.

Deviation: the tests and the last token share one uniform, that of the root. Prefixes are tested
from the longest to none; a failed test of chance h leaves (u - h) / (1 - h), a passed one u / h.
The other uniforms stay unused: where they belong to positions of the output (seeded requests), the
next round draws with those beyond what was emitted, and a test that had seen them would bias it.

Where numbers run out:
- a draft with q = 0 was not drawn from q: the chain ends before it;
- q and p are divided by their sums before they are compared, so neither need add up to 1 exactly;
- where s_i is zero nothing could be drawn: h_i is 0; at the root, where a token must be drawn, p
  equals q up to rounding, and it is drawn from p.

Letters: B requests, N nodes (node i is draft i, its parent node i - 1), C candidates of a law, V
vocabulary, K path width.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from specstack_kernels.reference.accept_rejection import LAST_UNIFORM, law_over_vocabulary
from specstack_kernels.reference.filter_probs import filter_probs
from specstack_kernels.reference.sample_and_walk import invert_cdf
from specstack_kernels.types import Walk


def accept_block(
    draft_tokens: Int[Tensor, "B N"],
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
    use_top_k_top_p: bool = True,
) -> Walk:
    """Return the accepted prefix of each chain; K = max_depth + 1.

    Args:
        law_tokens: distinct in a node that has a child, any ids below V in others.
        law_probs: q of each candidate; anything in nodes without a child.
        logit_rows: where in `logits` each node's stand.
        top_k: 1 is greedy: the argmax of the logits, lowest id first; no law and no uniform counts.
        uniforms: the first of each request counts.
        use_top_k_top_p: False if no request uses top_p < 1 or a top_k other than 1 and "all".
    """
    batch = draft_tokens.shape[0]
    accept_index = draft_tokens.new_full((batch, max_depth + 1), -1)
    emitted = draft_tokens.new_zeros((batch, max_depth + 1))
    accept_lens = draft_tokens.new_zeros(batch)
    for b in range(batch):
        num_drafts = min(int(num_nodes[b]) - 1, max_depth)
        drafts = draft_tokens[b, 1 : num_drafts + 1].tolist()
        visited = logits[logit_rows[b, : num_drafts + 1]].float()  # [num_drafts + 1, V]
        if top_k[b] == 1:
            best = visited.argmax(dim=-1).tolist()
            length = 0
            while length < num_drafts and drafts[length] == best[length]:
                length += 1
            token = best[length]
        else:
            settings = [
                setting[b].expand(num_drafts + 1) for setting in (temperature, top_k, top_p, min_p)
            ]
            p = filter_probs(visited, *settings, use_top_k_top_p=use_top_k_top_p).double()
            laws = zip(law_tokens[b], law_probs[b], strict=True)
            q = [law_over_vocabulary(*law, visited.shape[1]) for law in laws][:num_drafts]
            length, token = take_prefix(
                list(p), q, drafts, min(float(uniforms[b, 0]), LAST_UNIFORM)
            )
        accept_lens[b] = length + 1
        for i in range(length + 1):
            accept_index[b, i] = i
            emitted[b, i] = drafts[i] if i < length else token
    return Walk(accept_index, accept_lens, emitted)


def take_prefix(
    p: list[Float[Tensor, " V"]], q: list[Float[Tensor, " V"]], drafts: list[int], uniform: float
) -> tuple[int, int]:
    """Return how many drafts are accepted, and the token after them."""
    impossible = [i for i, draft in enumerate(drafts) if q[i][draft] == 0]
    drafts = drafts[: impossible[0]] if impossible else drafts
    p = [law / law.sum() for law in p]
    q = [law / law.sum() for law in q[: len(drafts)]]
    kept = [1.0]
    for i, draft in enumerate(drafts):
        kept.append(min(1.0, kept[i] * float(p[i][draft] / q[i][draft])))
    left = [(kept[i] * p[i] - q[i]).clamp(min=0) for i in range(len(drafts))]
    for length in range(len(drafts), 0, -1):
        if length == len(drafts):
            chance = kept[length]
        else:
            mass = float(left[length].sum())
            chance = mass / (mass + (1 - kept[length])) if mass > 0 else 0.0
        if uniform < chance:
            uniform = min(uniform / chance, LAST_UNIFORM)
            break
        uniform = min((uniform - chance) / (1 - chance), LAST_UNIFORM)
    else:
        length = 0
    if length == len(drafts) or left[length].sum() == 0:
        return length, invert_cdf(p[length], uniform)
    return length, invert_cdf(left[length], uniform)
