"""The target as its own answers tell it: no forward in a round, features computed once before.

At a node whose path the text continues, the target's choice is the text's next token; no other
node is ever reached, so its logits do not matter. Letters: B requests, L tokens, K path width,
V tokens that occur, and one more that stands for what lies beyond the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specstack.evaluation.known_texts import KnownText
from specstack.evaluation.observed import Observed, cut_at_end
from specstack.evaluation.running import KvTable, committed_path, committed_prompts
from specstack.models.heads.features import TargetFeatures
from specstack.types import (
    AcceptResult,
    CommittedTokens,
    DraftBatch,
    DraftTree,
    NodeLogits,
    SamplingTensors,
)


class ReplayTarget:
    """Texts of one batch; text i is in slot i."""

    observed: Observed

    def __init__(
        self,
        texts: Sequence[KnownText],
        table: KvTable,
        features: TargetFeatures | None,
        device: torch.device,
    ) -> None:
        """Begin with the prompts.

        Args:
            features: [B L ..] of the texts, padded at their ends; None where none are needed.
        """
        self.texts = texts
        self._table, self._features, self._device = table, features, device
        rows = [torch.tensor(text.tokens) for text in texts]
        self._end = 1 + max(int(row.max()) for row in rows)
        self._tokens: Int[Tensor, "B L"] = pad_sequence(rows, True, self._end).to(device)
        self._lengths = torch.tensor([len(row) for row in rows], device=device)
        self.slots: list[int] = list(range(len(texts)))
        self.seq_lens: Int[Tensor, " B"] = torch.tensor(
            [len(text.prompt) for text in texts], device=device
        )
        """Committed tokens of the requests that go on."""
        self._before = self.draft_batch()

    @property
    def _index(self) -> Int[Tensor, " B"]:
        return torch.tensor(self.slots, device=self._device, dtype=torch.int64)

    @property
    def bonus_tokens(self) -> Int[Tensor, " B"]:
        """The roots of those that go on."""
        return self._tokens[self._index, self.seq_lens]

    def prefill(self) -> CommittedTokens | None:
        """The prompts' features."""
        if self._features is None:
            return None
        at = [(i, p) for i, text in enumerate(self.texts) for p in range(len(text.prompt))]
        rows, positions = torch.tensor(at, device=self._device).unbind(1)
        return committed_prompts(
            self.slots,
            self._table,
            [(*text.prompt, text.output[0]) for text in self.texts],
            self._features.index((rows, positions)),
            self._device,
        )

    def draft_batch(self) -> DraftBatch:
        """The requests that go on."""
        has_features = self._features is not None
        return self._table.batch(self.slots, self.bonus_tokens, self.seq_lens, has_features)

    def verify(self, tree: DraftTree) -> NodeLogits:
        """Logits that are largest at the text's next token."""
        width = int(tree.depth.max()) + 1
        ahead = self.seq_lens[:, None] + 1 + torch.arange(width, device=self._device)
        inside = ahead < self._lengths[self._index][:, None]
        columns = ahead.clamp(max=self._tokens.shape[1] - 1)
        known = self._tokens[self._index[:, None], columns].masked_fill(~inside, self._end)
        values = torch.zeros(known.numel(), self._end + 1, device=self._device)
        values.scatter_(1, known.reshape(-1, 1), 1.0)
        first = torch.arange(len(known), device=self._device)[:, None] * width
        return NodeLogits(values, first + tree.depth)

    def sampling(self, num_positions: int) -> SamplingTensors:
        """Greedy: the text has been sampled, if at all, before."""
        ones = torch.ones(len(self.slots), device=self._device)
        uniforms = torch.zeros(len(self.slots), num_positions, device=self._device)
        return SamplingTensors(ones, ones.long(), ones, ones * 0, uniforms, True, False)

    def commit(self, tree: DraftTree, accepted: AcceptResult) -> AcceptResult:
        """Emit up to the end of the text."""
        num_left = self._lengths[self._index] - 1 - self.seq_lens
        self._before = self.draft_batch()
        accepted, self.observed = cut_at_end(accepted, num_left)
        self.seq_lens = self.seq_lens + accepted.accept_lens
        return accepted

    def committed(self, tree: DraftTree, accepted: AcceptResult) -> CommittedTokens | None:
        """The features of the last round's path."""
        if self._features is None:
            return None
        width = accepted.accept_index.shape[1]
        columns = self._before.seq_lens[:, None] + torch.arange(width, device=self._device)
        columns = columns.clamp(max=self._tokens.shape[1] - 1).flatten()
        rows = self._index[:, None].expand(-1, width).flatten()
        features = self._features.index((rows, columns))
        return committed_path(self._before, self._table, accepted, features)

    def drop_finished(self) -> None:
        """Let those go whose last token is their bonus token."""
        goes_on = (self.seq_lens < self._lengths[self._index] - 1).tolist()
        rows = [row for row, wanted in enumerate(goes_on) if wanted]
        self.slots = [self.slots[row] for row in rows]
        self.seq_lens = self.seq_lens[rows]
