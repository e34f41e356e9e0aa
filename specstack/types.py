"""What the parts of a round hand to each other: tensors with shapes, no behaviour.

Letters: B requests, M candidate nodes, N tree nodes including the root, K path width
(= depth + 1), V vocabulary, C candidates of a draft law, L committed tokens (padded), T packed
tokens. Node 0 of a tree is the root: the bonus token of the last round. What a head drafter is lent
is in `drafters.base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from specstack.models.heads.features import TargetFeatures


def index_on(numbers: Sequence[int], device: torch.device) -> Int[Tensor, " T"]:
    """Host numbers as an index on the device. Host sync: none, unlike `torch.tensor` there."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def _moved(data: Any, device: torch.device) -> Any:
    """A dataclass of tensors, others like it, and None, on `device`."""
    if data is None or isinstance(data, Tensor):
        return data if data is None else data.to(device)
    return type(data)(**{f.name: _moved(getattr(data, f.name), device) for f in fields(data)})


@dataclass(frozen=True)
class Drawing:
    """How the drafts of each request are drawn at random."""

    temperature: Float[Tensor, " B"]
    """Of the draft law; the request's own serves it best."""
    is_greedy: Bool[Tensor, " B"]
    """Takes the most probable drafts, instead."""
    seeds: Int[Tensor, " B"]
    """A seeded request's seed; otherwise new numbers in every round."""


@dataclass(frozen=True)
class DraftBatch:
    """The requests of one round, as a drafter sees them."""

    slots: tuple[int, ...]
    """Where each request keeps its state while it runs."""
    bonus_tokens: Int[Tensor, " B"]
    """Roots: emitted, not yet in the target's KV."""
    seq_lens: Int[Tensor, " B"]
    """Committed tokens, bonus token excluded: the position of the bonus token."""
    kv_slots: Int[Tensor, "B L"]
    """Where the target keeps the KV of committed tokens; beyond a length: any slot there is.
    L = 0 where no drafter asked for features."""
    drawing: Drawing | None = None
    """For drafters that draw."""

    @property
    def slot_index(self) -> Int[Tensor, " B"]:
        """The slots, on the device. Host sync: none."""
        return index_on(self.slots, self.seq_lens.device)

    def select(self, rows: Sequence[int]) -> DraftBatch:
        """Some of the requests. Host sync: none."""
        index, own = index_on(rows, self.seq_lens.device), self.drawing
        return DraftBatch(
            tuple(self.slots[row] for row in rows),
            self.bonus_tokens[index],
            self.seq_lens[index],
            self.kv_slots[index],
            own and Drawing(own.temperature[index], own.is_greedy[index], own.seeds[index]),
        )


@dataclass(frozen=True)
class CommittedTokens:
    """Tokens whose target features have become final, packed, positions rising per request.

    Padding, so that the host need not know how many tokens a round commits, has `requests` -1;
    the rest of it may be anything.
    """

    features: TargetFeatures
    """[T ..], layers in the order of the drafter's `needs`."""
    next_tokens: Int[Tensor, " T"]
    """The token after each; for the last of a request its new bonus token."""
    positions: Int[Tensor, " T"]
    """Of a request's first: `batch.seq_lens`."""
    kv_slots: Int[Tensor, " T"]
    """Where the target keeps their KV; a drafter keeps its own at the same index of its pool."""
    requests: Int[Tensor, " T"]
    """Row of `batch`."""
    batch: DraftBatch
    """Before these tokens: what they follow. Its bonus tokens are not read."""
    max_new_tokens: int
    """No request has more tokens here."""

    @classmethod
    def of_paths(
        cls,
        batch: DraftBatch,
        accepted: AcceptResult,
        kv_slots: Int[Tensor, "B K"],
        features: TargetFeatures,
    ) -> CommittedTokens:
        """The accepted paths of a round; the rest of each row is padding. Host sync: none.

        Args:
            batch: before the round.
            kv_slots: where the paths' KV is now.
            features: [B * K ..] of the paths' nodes.
        """
        num_requests, width = accepted.accept_index.shape
        step = torch.arange(width, device=kv_slots.device)
        row = torch.arange(num_requests, device=kv_slots.device)[:, None]
        is_node = step < accepted.accept_lens[:, None]
        return cls(
            features=features,
            next_tokens=accepted.emitted.flatten().to(torch.int64),
            positions=(batch.seq_lens[:, None] + step).flatten(),
            kv_slots=kv_slots.flatten(),
            requests=torch.where(is_node, row, -1).flatten(),
            batch=batch,
            max_new_tokens=width,
        )


@dataclass(frozen=True)
class DraftLaw:
    """What drafts were drawn from: for each node the law of its children, over C candidates.

    Siblings are drawn one after the other, without replacement, the first in the row first.
    """

    tokens: Int[Tensor, "B N C"]
    """Distinct in a node."""
    probs: Float[Tensor, "B N C"]
    """q: adds up to 1 where a node has children; 0 is allowed."""

    def gather(self, nodes: Int[Tensor, "B S"]) -> DraftLaw:
        """The laws of some nodes. Host sync: none."""
        index = nodes[..., None].expand(-1, -1, self.tokens.shape[2])
        return DraftLaw(self.tokens.gather(1, index), self.probs.gather(1, index))

    def padded(self, num_nodes: int) -> DraftLaw:
        """With nodes that have no children at the end. Host sync: none."""
        padding = (0, 0, 0, num_nodes - self.tokens.shape[1])
        return DraftLaw(pad(self.tokens, padding), pad(self.probs, padding))


@dataclass(frozen=True)
class DraftProposal:
    """Candidate drafts of one round, one trie per request, before a builder picks nodes.

    A candidate's parent stands before it in the same row; -1 means a child of the root. Siblings
    carry distinct tokens. Slots without a candidate have `log_q = -inf`.
    """

    tokens: Int[Tensor, "B M"]
    parent_index: Int[Tensor, "B M"]
    log_q: Float[Tensor, "B M"]
    """float32: log of the probability, given its parent, that the target takes it (<= 0)."""
    sources: Int[Tensor, "B M"] | None = None
    """Bit i: drafter i of a merge proposed it; None where there is one drafter."""
    law: DraftLaw | None = None
    """Of the root, then of each candidate, [B, M + 1, C]; None: drafts were not drawn at random.

    Drawn siblings stand in the order of the draws."""


@dataclass(frozen=True)
class DraftTree:
    """A tree of N nodes per request; live nodes stand first, dead ones pad the row.

    Dead nodes (index >= num_nodes) have `parent_index = 0`, `depth = 1`, see only the root and
    themselves, and are not linked, so that no walk reaches them.
    """

    tokens: Int[Tensor, "B N"]
    parent_index: Int[Tensor, "B N"]
    depth: Int[Tensor, "B N"]
    tree_mask: Bool[Tensor, "B N N"]
    """Row attends column: the node itself and its ancestors."""
    retrieve_next_token: Int[Tensor, "B N"]
    """First child, or -1."""
    retrieve_next_sibling: Int[Tensor, "B N"]
    """Next child of the same parent, or -1."""
    log_q: Float[Tensor, "B N"]
    """Cumulative along the path; 0 at the root, -inf at dead nodes."""
    num_nodes: Int[Tensor, " B"]
    """Live nodes including the root, in [1, N]."""
    sources: Int[Tensor, "B N"] | None = None
    """As `DraftProposal.sources`; 0 at the root and at dead nodes."""
    law: DraftLaw | None = None
    """What the children of each node were drawn from; None: drafts were not drawn at random."""
    offered_log_q: Float[Tensor, "B S"] | None = None
    """As `log_q`, of the drafts that the budget allowed, before a price left some out: column s is
    node s + 1 where that lives. -inf where there was none; None at trees of a root alone."""

    @property
    def num_draft_tokens(self) -> int:
        """N: nodes per request, root and dead nodes included."""
        return self.tokens.shape[1]

    @classmethod
    def root_only(cls, bonus_tokens: Int[Tensor, " B"]) -> DraftTree:
        """Trees without drafts: plain decoding."""
        root = bonus_tokens[:, None].to(torch.int64)
        none = torch.full_like(root, -1)
        return cls(
            tokens=root,
            parent_index=none,
            depth=torch.zeros_like(root),
            tree_mask=torch.ones_like(root, dtype=torch.bool)[:, :, None],
            retrieve_next_token=none,
            retrieve_next_sibling=none,
            log_q=torch.zeros(root.shape, device=root.device),
            num_nodes=torch.ones_like(bonus_tokens, dtype=torch.int64),
        )

    def narrow(self, num_draft_tokens: int) -> DraftTree:
        """Keep the first nodes of every row. The dropped ones must be dead in every row."""
        n = num_draft_tokens
        return DraftTree(
            tokens=self.tokens[:, :n],
            parent_index=self.parent_index[:, :n],
            depth=self.depth[:, :n],
            tree_mask=self.tree_mask[:, :n, :n],
            retrieve_next_token=self.retrieve_next_token[:, :n],
            retrieve_next_sibling=self.retrieve_next_sibling[:, :n],
            log_q=self.log_q[:, :n],
            num_nodes=self.num_nodes,
            sources=None if self.sources is None else self.sources[:, :n],
            law=None if self.law is None else self.law.padded(n),
            offered_log_q=self.offered_log_q,
        )

    def to(self, device: torch.device) -> DraftTree:
        """The same trees on `device`; self when they are there."""
        if self.tokens.device == device:
            return self
        moved: DraftTree = _moved(self, device)
        return moved


@dataclass(frozen=True)
class NodeLogits:
    """The target's logits at tree nodes, packed: T rows for the nodes that were computed."""

    values: Float[Tensor, "T V"]
    rows: Int[Tensor, "B N"]
    """Row of each node; nodes that were not computed (dead ones) name their root's row."""


@dataclass(frozen=True)
class SamplingTensors:
    """Per-request sampling settings, as SGLang normalises them: top_k = 1 is greedy."""

    temperature: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    """Values >= V disable the filter."""
    top_p: Float[Tensor, " B"]
    """1.0 disables the filter."""
    min_p: Float[Tensor, " B"]
    """0.0 disables the filter."""
    uniforms: Float[Tensor, "B K"]
    """One number in [0, 1) per request and visited depth; the only source of randomness."""
    is_all_greedy: bool
    """Host knowledge: every request has top_k = 1."""
    use_top_k_top_p: bool = True
    """Host knowledge: some request uses top_p < 1 or 1 < top_k < V. False saves a sort."""

    @property
    def filters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top-k, top-p and min-p, as ops take them."""
        return self.temperature, self.top_k, self.top_p, self.min_p


@dataclass(frozen=True)
class AcceptResult:
    """What a round emits."""

    accept_index: Int[Tensor, "B K"]
    """Node ids of the accepted path, root first, padded with -1."""
    accept_lens: Int[Tensor, " B"]
    """Emitted tokens per request: correct drafts plus the bonus token, in [1, K]."""
    emitted: Int[Tensor, "B K"]
    """Emitted tokens: the drafts of the path without the root, then the new bonus; 0 beyond."""

    @property
    def num_correct_drafts(self) -> Int[Tensor, " B"]:
        """Accepted drafts per request, without the bonus token."""
        return self.accept_lens - 1

    @property
    def bonus_tokens(self) -> Int[Tensor, " B"]:
        """The last emitted token of each request: the root of the next tree."""
        return self.emitted.gather(1, (self.accept_lens - 1)[:, None].long())[:, 0]
