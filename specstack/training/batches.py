"""Which texts a step trains on and where drafts begin in them: functions of seed and step alone.

Nothing here has a state, so a resumed run goes on exactly, and what a text gets does not depend on
the process that it falls to. Letters: B sequences, L tokens (padded), A anchors (padded with -1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specstack.training.texts import Text

_WINDOW = 32
"""Batches among which texts are sorted by length."""


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded at their ends, and the randomness of one forward."""

    index: tuple[int, ...]
    """Of the texts."""
    tokens: Int[Tensor, "B L"]
    num_tokens: Int[Tensor, " B"]
    num_prompt: Int[Tensor, " B"]
    anchors: Int[Tensor, "B A"]
    """Tokens that drafts follow: answer tokens with at least one token after them."""
    num_real: Int[Tensor, "B A"]
    """Slots of a block that carry real tokens: 1, the anchor, unless refreshing is trained."""
    lost_branch: Int[Tensor, " B"]
    """Branch dropout: 0 none, 1 the target's KV, 2 the head's own attention."""
    mixed: Bool[Tensor, "B L"]
    """Prefix tokens whose KV is the head's own."""

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of answers. Host sync where the tensors are on a device."""
        return int((self.num_tokens - self.num_prompt).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch elsewhere."""
        names = ("tokens", "num_tokens", "num_prompt", "anchors", "num_real", "lost_branch")
        moved = {name: getattr(self, name).to(device) for name in (*names, "mixed")}
        return replace(self, **moved)


@dataclass(frozen=True)
class Draws:
    """What is random in a batch."""

    seed: str
    per_sequence: int | None
    block_size: int
    refresh_share: float = 0.0
    branch_dropout: float = 0.0
    prefix_mix: float = 0.0


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: str) -> list[list[int]]:
    """Every text once, in batches of texts of similar length, all of the same size.

    The last batch is filled up with texts of the first.
    """
    random = Random(f"order {seed}")
    order = list(range(len(lengths)))
    random.shuffle(order)
    missing = -len(order) % batch_size
    order += (order * (missing // len(order) + 1))[:missing]
    batches: list[list[int]] = []
    for start in range(0, len(order), _WINDOW * batch_size):
        window = sorted(order[start : start + _WINDOW * batch_size], key=lambda i: lengths[i])
        batches += [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
    random.shuffle(batches)
    return batches


def collate(texts: Sequence[Text], index: Sequence[int], draws: Draws) -> Batch:
    """Put texts side by side and draw."""
    rows = [_draw(texts[i], Random(f"draw {draws.seed} {i}"), draws) for i in index]
    chosen = [texts[i] for i in index]
    length = max(len(text.tokens) for text in chosen)
    tokens = torch.zeros(len(index), length, dtype=torch.long)
    mixed = torch.zeros(len(index), length, dtype=torch.bool)
    for b, (text, row) in enumerate(zip(chosen, rows, strict=True)):
        tokens[b, : len(text.tokens)] = torch.from_numpy(text.tokens)
        mixed[b, : len(text.tokens)] = torch.tensor(row.mixed)
    return Batch(
        index=tuple(index),
        tokens=tokens,
        num_tokens=torch.tensor([len(text.tokens) for text in chosen]),
        num_prompt=torch.tensor([text.num_prompt for text in chosen]),
        anchors=_padded([row.anchors for row in rows], -1),
        num_real=_padded([row.num_real for row in rows], 1),
        lost_branch=torch.tensor([row.lost_branch for row in rows]),
        mixed=mixed,
    )


@dataclass(frozen=True)
class _Row:
    anchors: list[int]
    num_real: list[int]
    lost_branch: int
    mixed: list[bool]


def _draw(text: Text, random: Random, draws: Draws) -> _Row:
    # The features that a draft begins with end before its anchor: token 0 has none.
    places = range(max(1, text.num_prompt), len(text.tokens) - 1)
    wanted = len(places) if draws.per_sequence is None else draws.per_sequence
    anchors = sorted(random.sample(places, min(wanted, len(places))))
    num_real = [
        random.randint(2, draws.block_size) if random.random() < draws.refresh_share else 1
        for _ in anchors
    ]
    lost = random.choice((1, 2)) if random.random() < draws.branch_dropout else 0
    # Token 0 has no input of the head before it.
    mixed = [i > 0 and random.random() < draws.prefix_mix for i in range(len(text.tokens))]
    return _Row(anchors, num_real, lost, mixed)


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "B A"]:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
