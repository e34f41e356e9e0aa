"""How children of a node are chosen from its law: the most probable, or drawn at random.

Drawn children come without replacement, by the Gumbel-top-k trick (Kool et al., arXiv 1903.06059).
All nodes of a depth share one noise per token: a walk visits one node of a depth, so no two draws
that matter share anything. Letters: B requests, F frontier nodes, W tokens, C candidates, k
children.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.drafters.expansion import Children
from specstack.types import DraftBatch, DraftLaw, Drawing
from specstack.verify.uniforms import seeded_numbers, seeded_uniforms
from specstack_kernels.ops import top_tokens
from specstack_kernels.types import ScoredFrontier

DRAFT_STREAM = 0x5EED_0F_D2AF75
"""Apart from the numbers that verification draws with."""
MAX_DEPTH = 1 << 10
NUM_CANDIDATES = 64
"""Tokens of a node that can be drawn. Any law is exact, as long as the rule knows it; where a
corrector scores its own candidates, those are the law."""


Depth = int | Int[Tensor, " F"]
"""0: the root; one for all nodes, or one each."""


class Choice(Protocol):
    """Chooses children. Host sync: none."""

    @property
    def width(self) -> int:
        """Most children of a node."""

    def of_logits(
        self, logits: Float[Tensor, "B F W"], token_ids: Int[Tensor, " W"] | None, depth: Depth
    ) -> Children:
        """Return children of nodes at `depth`.

        Args:
            token_ids: target ids of the W tokens; None: equal.
        """

    def of_scored(
        self, scored: ScoredFrontier, tokens: Int[Tensor, "B F C"], depth: Depth
    ) -> Children:
        """The same where the C candidates of each node have been scored."""


@dataclass(frozen=True)
class Best:
    """The most probable ones."""

    width: int

    def of_logits(
        self, logits: Float[Tensor, "B F W"], token_ids: Int[Tensor, " W"] | None, depth: Depth
    ) -> Children:
        """As `Choice`."""
        width = min(self.width, logits.shape[2])
        best = top_tokens(logits.flatten(0, 1), width, token_ids=token_ids)
        size = (*logits.shape[:2], width)
        return Children(best.tokens.view(size), best.log_probs.view(size))

    def of_scored(
        self, scored: ScoredFrontier, tokens: Int[Tensor, "B F C"], depth: Depth
    ) -> Children:
        """As `Choice`."""
        return Children(tokens.gather(2, scored.best_index), scored.best_log_q.float())


@dataclass(frozen=True)
class Drawn:
    """Random ones, from the best tokens of a node at the drawing's temperature."""

    width: int
    drawing: Drawing
    seq_lens: Int[Tensor, " B"]

    @classmethod
    def of(cls, batch: DraftBatch, width: int) -> Drawn:
        """For the requests of a round."""
        assert batch.drawing is not None, "the engine gives no numbers to draw with"
        return cls(width, batch.drawing, batch.seq_lens)

    def of_logits(
        self, logits: Float[Tensor, "B F W"], token_ids: Int[Tensor, " W"] | None, depth: Depth
    ) -> Children:
        """As `Choice`; log q is that of the law, and -inf where it has no token left."""
        best = Best(max(NUM_CANDIDATES, self.width)).of_logits(logits, token_ids, depth)
        return self._draw(best.log_q, best.tokens, depth)

    def of_scored(
        self, scored: ScoredFrontier, tokens: Int[Tensor, "B F C"], depth: Depth
    ) -> Children:
        """As `of_logits`."""
        return self._draw(scored.log_q.float(), tokens, depth)

    def _draw(
        self, log_q: Float[Tensor, "B F C"], tokens: Int[Tensor, "B F C"], depth: Depth
    ) -> Children:
        law = (log_q / self.drawing.temperature[:, None, None]).log_softmax(dim=-1)
        is_greedy = self.drawing.is_greedy[:, None, None]
        noise = self._noise(tokens, depth).to(law.dtype).masked_fill(is_greedy, 0.0)
        drawn = (law + noise).topk(min(self.width, law.shape[-1]), dim=-1)
        probs = law.exp()
        law = law.masked_fill(probs == 0, -torch.inf)  # nothing can be divided by these
        return Children(
            tokens.gather(2, drawn.indices), law.gather(2, drawn.indices), DraftLaw(tokens, probs)
        )

    def _noise(self, tokens: Int[Tensor, "B F C"], depth: Depth) -> Float[Tensor, "B F C"]:
        """Standard Gumbel numbers; the length is another in every round of a request."""
        place = (self.seq_lens * MAX_DEPTH)[:, None] + depth
        streams = seeded_numbers(self.drawing.seeds ^ DRAFT_STREAM, place)
        streams = streams.expand(tokens.shape[:2]).flatten()
        uniforms = seeded_uniforms(streams, tokens.flatten(0, 1)).view(tokens.shape)
        smallest = 2.0**-54  # half a step of the uniforms: no infinite noise
        return -torch.log(-torch.log(uniforms.clamp(min=smallest)))
