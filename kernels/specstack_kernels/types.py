"""What the ops return: named tuples of tensors, as kernels cross no package boundary with classes.

Letters: B requests, N tree nodes including the root, K path width (= max_depth + 1),
S chosen drafts, T packed elements, P bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor


class ScoredFrontier(NamedTuple):
    """What the candidates of a depth (C) are worth behind each node of the frontier (F)."""

    log_q: Float[Tensor, "B F C"]
    """Given the node."""
    best_index: Int[Tensor, "B F k"]
    """Candidates, best first, the lower of equal ones first."""
    best_log_q: Float[Tensor, "B F k"]


class TopTokens(NamedTuple):
    """The most probable tokens of each row of logits (R), best first."""

    tokens: Int[Tensor, "R k"]
    log_probs: Float[Tensor, "R k"]
    """float32."""


class Walk(NamedTuple):
    """The accepted path of each request and what it emits."""

    accept_index: Int[Tensor, "B K"]
    """Node ids of the path, root first, padded with -1."""
    accept_lens: Int[Tensor, " B"]
    """Emitted tokens: correct drafts plus the bonus token, in [1, K]."""
    emitted: Int[Tensor, "B K"]
    """The drafts of the path without the root, then the bonus token, then 0."""

    @classmethod
    def unwritten(cls, batch: int, width: int, device: torch.device) -> Walk:
        """Memory for a kernel to write all of."""
        path = torch.empty((batch, width), dtype=torch.int64, device=device)
        lens = torch.empty(batch, dtype=torch.int64, device=device)
        return cls(path, lens, torch.empty_like(path))


class LinkedTree(NamedTuple):
    """Everything that follows from the parents of a tree."""

    depth: Int[Tensor, "B N"]
    """0 at the root, 1 at dead nodes."""
    tree_mask: Bool[Tensor, "B N N"]
    """Row attends column: the node itself and its ancestors."""
    retrieve_next_token: Int[Tensor, "B N"]
    """First child, or -1."""
    retrieve_next_sibling: Int[Tensor, "B N"]
    """Next child of the same parent, or -1."""


class BestNodes(NamedTuple):
    """The best candidates of each trie, best first; ones without a finite path stand last."""

    order: Int[Tensor, "B S"]
    """Candidate index."""
    path_log_q: Float[Tensor, "B S"]
    """Cumulative log q, falling."""
    parent_node: Int[Tensor, "B S"]
    """In nodes of the tree to build: 0 the root, draft s is node s + 1; 0 where log q is -inf."""


class PackedBits(NamedTuple):
    """Flags as bits, the first in the lowest bit; each request starts on a byte."""

    packed: UInt8[Tensor, " P"]
    byte_offsets: Int[Tensor, " B+1"]
    """Where each request starts, and the end."""


class PackedTreeMask(NamedTuple):
    """Attention masks over prefix and tree, one request after the other."""

    full: Bool[Tensor, " T"]
    """Per request N rows of seq_len + N columns."""
    offsets: Int[Tensor, " B+1"]
    """Where each request starts, and the end."""


class Prefixes(NamedTuple):
    """The most probable prefixes of each request, best first; padding stands last."""

    tokens: Int[Tensor, "B S"]
    """Last token of the prefix; 0 in padding."""
    parent_index: Int[Tensor, "B S"]
    """Where the prefix without its last token stands in the row; -1: the root, and padding."""
    log_q: Float[Tensor, "B S"]
    """Of the last token given the rest; -inf in padding."""
    path_log_q: Float[Tensor, "B S"]
    """Of the whole prefix, falling; -inf in padding."""
