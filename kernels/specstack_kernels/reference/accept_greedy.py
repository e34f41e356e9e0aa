"""Greedy acceptance over a draft tree: the definition.

Starting at the root, move to the child whose token equals the target's argmax at the current
node; stop when there is none. Letters: B requests, N nodes (node 0 is the bonus token of the
last round), K path width. Nodes at or beyond `num_nodes` are dead.
"""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from specstack_kernels.types import Walk


def accept_greedy(
    draft_tokens: Int[Tensor, "B N"],
    parent_index: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    target_predict: Int[Tensor, "B N"],
    *,
    max_depth: int,
) -> Walk:
    """Return the accepted path of each request; K = max_depth + 1."""
    batch = draft_tokens.shape[0]
    accept_index = draft_tokens.new_full((batch, max_depth + 1), -1)
    emitted = draft_tokens.new_zeros((batch, max_depth + 1))
    accept_lens = draft_tokens.new_zeros(batch)
    for b in range(batch):
        node = 0
        for step in range(max_depth + 1):
            token = int(target_predict[b, node])
            accept_index[b, step] = node
            emitted[b, step] = token
            accept_lens[b] = step + 1
            child = find_child(draft_tokens[b], parent_index[b], int(num_nodes[b]), node, token)
            if child == -1:
                break
            node = child
    return Walk(accept_index, accept_lens, emitted)


def find_child(
    draft_tokens: Int[Tensor, " N"],
    parent_index: Int[Tensor, " N"],
    num_nodes: int,
    node: int,
    token: int,
) -> int:
    """Return the live child of `node` that carries `token`, or -1."""
    for child in range(1, num_nodes):
        if int(parent_index[child]) == node and int(draft_tokens[child]) == token:
            return child
    return -1
