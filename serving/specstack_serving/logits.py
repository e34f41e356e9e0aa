"""What turns the target's logits at every tree node into the distribution that plain decoding
would sample from there: penalties, grammar, bias. In the engine's own order.

SGLang's speculative workers apply one penalty state to the whole window. Here each node sees the
penalties of its own path, so that accepting several drafts at once changes nothing. Plain decoding
with overlapped scheduling counts penalties one token late; what is reproduced is the synchronous
(documented) behaviour.

Letters: B requests, N tree nodes, T computed nodes of all requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.types import DraftTree, NodeLogits
from specstack_serving import sglang_compat as sgl


def adjust_logits(
    logits: NodeLogits,
    tree: DraftTree,
    batch: Any,
    output_tokens: Callable[[int], list[int]],
    computed: Int[Tensor, " T"] | None = None,
) -> None:
    """Apply penalties, grammar masks and logit bias in place.

    Args:
        batch: SGLang's ScheduleBatch.
        output_tokens: emitted tokens of the i-th request, root included; called only for
            requests that carry penalties.
        computed: the node (b * N + n) behind each row of `logits`; None when all are there.
    """
    for i, req in enumerate(batch.reqs):
        if _has_penalties(req.sampling_params):
            _penalise(logits, tree, i, req, output_tokens(i))
    if batch.has_grammar:
        _mask_grammar(logits.values, tree, batch, computed)
    if batch.sampling_info.logit_bias is not None:
        num_nodes = tree.num_draft_tokens
        if computed is None:
            computed = torch.arange(tree.tokens.numel(), device=tree.tokens.device)
        logits.values.add_(batch.sampling_info.logit_bias[computed // num_nodes])


def _mask_grammar(
    values: Float[Tensor, "T V"], tree: DraftTree, batch: Any, computed: Tensor | None
) -> None:
    mask = sgl.build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=sgl.GrammarTree.from_device(
            tree.retrieve_next_token, tree.retrieve_next_sibling, tree.tokens
        ),
        sampling_info=batch.sampling_info,
        device=values.device,
        barrier=None,  # grammar batches are not overlapped: nothing is pending
    )
    if mask is None:
        return
    if computed is not None:
        mask = mask._replace(vocab_mask=mask.vocab_mask[computed])
    mask.apply(values)


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


def _penalise(logits: NodeLogits, tree: DraftTree, i: int, req: Any, output: list[int]) -> None:
    """Apply request i's penalties to each of its nodes, counting the node's own path.

    Dead nodes share their root's row: they are given the root's path and so its result, which
    makes the duplicate writes equal. Host sync: none.
    """
    params, rows = req.sampling_params, logits.rows[i]
    values = logits.values.index_select(0, rows)  # [N, V]
    num_nodes, vocab = values.shape
    is_live = torch.arange(num_nodes, device=rows.device) < tree.num_nodes[i]
    counts = torch.bincount(
        torch.tensor(output, dtype=torch.int64, device=rows.device), minlength=vocab
    )
    counts = counts.to(torch.float32).repeat(num_nodes, 1)
    path = (tree.tree_mask[i, :, 1:] & is_live[:, None]).to(torch.float32)  # root: in `output`
    counts.scatter_add_(1, tree.tokens[i, 1:].expand(num_nodes, -1), path)
    seen = counts > 0
    if params.frequency_penalty != 0.0:
        values.sub_(counts * params.frequency_penalty)
    if params.presence_penalty != 0.0:
        values.sub_(seen * params.presence_penalty)
    if params.min_new_tokens > 0:
        num_output = len(output) + torch.where(is_live, tree.depth[i], 0)  # [N]
        stop_ids = [i for i in _stop_token_ids(req) if 0 <= i < vocab]  # tokenizers may have more
        stops = torch.tensor(stop_ids, dtype=torch.int64, device=rows.device)
        blocked = values.index_select(1, stops)
        blocked.masked_fill_((num_output < params.min_new_tokens)[:, None], float("-inf"))
        values.index_copy_(1, stops, blocked)
    if params.repetition_penalty != 1.0:
        p = params.repetition_penalty
        penalised = torch.where(values < 0, values * p, values / p)
        values = torch.where(seen, penalised, values)
    logits.values.index_copy_(0, rows, values)


def _stop_token_ids(req: Any) -> list[int]:
    """Every token that may end the request, as SGLang's own min_new_tokens collects them."""
    tokenizer = req.tokenizer
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if tokenizer is not None:
        ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)
