"""What the ops return: named tuples of tensors, as kernels cross no package boundary with classes.

Letters: B requests, N tree nodes including the root, K path width (= max_depth + 1).
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor


class Walk(NamedTuple):
    """The accepted path of each request and what it emits."""

    accept_index: Int[Tensor, "B K"]
    """Node ids of the path, root first, padded with -1."""
    accept_lens: Int[Tensor, " B"]
    """Emitted tokens: correct drafts plus the bonus token, in [1, K]."""
    emitted: Int[Tensor, "B K"]
    """The drafts of the path without the root, then the bonus token, then 0."""


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
