"""What turns the target's logits at every tree node into the distribution that plain decoding
would sample from there: penalties, grammar, bias. In the engine's own order.

SGLang's speculative workers apply one penalty state to the whole window. Here each node sees the
penalties of its own path, so that accepting several drafts at once changes nothing. Plain decoding
with overlapped scheduling counts penalties one token late; what is reproduced is the synchronous
(documented) behaviour.

Letters: B requests, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specstack.types import DraftTree
from specstack_serving import sglang_compat as sgl


def adjust_logits(
    logits: Float[Tensor, "B N V"],
    tree: DraftTree,
    batch: Any,
    output_tokens: Callable[[int], list[int]],
) -> None:
    """Apply penalties, grammar masks and logit bias in place.

    Args:
        batch: SGLang's ScheduleBatch.
        output_tokens: emitted tokens of the i-th request, root included; called only for
            requests that carry penalties.
    """
    for i, req in enumerate(batch.reqs):
        if _has_penalties(req.sampling_params):
            _penalise(logits[i], tree, i, req, output_tokens(i))
    if batch.has_grammar:
        mask = sgl.build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=sgl.GrammarTree.from_device(
                tree.retrieve_next_token, tree.retrieve_next_sibling, tree.tokens
            ),
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=None,  # grammar batches are not overlapped: nothing is pending
        )
        if mask is not None:
            mask.apply(logits.view(-1, logits.shape[-1]))
    if batch.sampling_info.logit_bias is not None:
        logits.add_(batch.sampling_info.logit_bias[:, None, :])


def needs_output_history(batch: Any) -> bool:
    """Whether any request's distribution depends on what it has emitted."""
    return any(_has_penalties(req.sampling_params) for req in batch.reqs)


def _has_penalties(params: Any) -> bool:
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _penalise(
    logits: Float[Tensor, "N V"], tree: DraftTree, i: int, req: Any, output: list[int]
) -> None:
    """Apply request i's penalties to each of its nodes, counting the node's own path."""
    params, vocab = req.sampling_params, logits.shape[-1]
    counts = torch.bincount(
        torch.tensor(output, dtype=torch.int64, device=logits.device), minlength=vocab
    )
    path = tree.tree_mask[i, :, 1:].to(torch.float32)  # [N, N-1]; the root is in `output`
    counts = counts.to(torch.float32).repeat(logits.shape[0], 1)
    counts.scatter_add_(1, tree.tokens[i, 1:].expand(logits.shape[0], -1), path)
    seen = counts > 0
    if params.frequency_penalty != 0.0:
        logits.sub_(counts * params.frequency_penalty)
    if params.presence_penalty != 0.0:
        logits.sub_(seen * params.presence_penalty)
    if params.min_new_tokens > 0:
        too_short = len(output) + tree.depth[i] < params.min_new_tokens  # [N]
        stop_ids = [i for i in _stop_token_ids(req) if 0 <= i < vocab]  # tokenizers may have more
        stops = torch.tensor(stop_ids, dtype=torch.int64, device=logits.device)
        blocked = logits.index_select(1, stops)
        blocked.masked_fill_(too_short[:, None], float("-inf"))
        logits.index_copy_(1, stops, blocked)
    if params.repetition_penalty != 1.0:
        p = params.repetition_penalty
        penalised = torch.where(logits < 0, logits * p, logits / p)
        logits.copy_(torch.where(seen, penalised, logits))


def _stop_token_ids(req: Any) -> list[int]:
    """Every token that may end the request, as SGLang's own min_new_tokens collects them."""
    tokenizer = req.tokenizer
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if tokenizer is not None:
        ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)
