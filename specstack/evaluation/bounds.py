"""The bound of `bound` with the target's own law, at positions drawn from the texts.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specstack.evaluation.bound import path_bound
from specstack.evaluation.configurations import Configuration
from specstack.evaluation.known_texts import KnownText
from specstack.training.target_model import FrozenTarget

Bar = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True)
class Bounds:
    """Mean bounds over the sampled positions."""

    values: dict[tuple[int, int], float]
    """By draft budget and depth."""
    num_positions: int


def sampled_bounds(
    target: FrozenTarget,
    texts: Sequence[KnownText],
    configurations: Sequence[Configuration],
    temperature: float,
    top_p: float,
    num_positions: int,
    seed: int,
    bar: Bar,
) -> Bounds:
    """Search best first from positions drawn without replacement; one forward per path."""
    places = [(i, j) for i, text in enumerate(texts) for j in range(1, len(text.output))]
    random = np.random.default_rng(seed)
    chosen = random.permutation(len(places))[:num_positions]
    sizes = sorted({(c.budget.draft_budget, c.reach) for c in configurations})
    sums = dict.fromkeys(sizes, 0.0)
    advance = bar("bounds", len(chosen))
    for number in chosen:
        i, j = places[number]
        tokens = texts[i].prompt + texts[i].output[:j]
        for depth in sorted({depth for _, depth in sizes}):
            budgets = [budget for budget, d in sizes if d == depth]
            law = TargetLaw(target, tokens, temperature, top_p, max(budgets))
            for budget, value in zip(budgets, path_bound(law, budgets, depth), strict=True):
                sums[budget, depth] += value
        advance(1)
    count = max(1, len(chosen))
    return Bounds({size: total / count for size, total in sums.items()}, len(chosen))


class TargetLaw:
    """What the target says after a text and a path: the most probable tokens."""

    def __init__(
        self,
        target: FrozenTarget,
        tokens: Sequence[int],
        temperature: float,
        top_p: float,
        num_children: int,
    ) -> None:
        from transformers import DynamicCache

        self._model, self._tokens = target.model, tuple(tokens)
        self._device = target.tables.embedding.device
        self._temperature, self._top_p, self._num_children = temperature, top_p, num_children
        self._cache = DynamicCache()
        with torch.no_grad():  # the last token is fed with every path
            self._feed(self._tokens[:-1])

    @torch.no_grad()
    def __call__(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """Host sync: copies the law."""
        num_kept = len(self._tokens) - 1
        logits = self._feed((self._tokens[-1], *path))[0, -1].float() / self._temperature
        self._cache.crop(num_kept)
        law = logits.softmax(-1).sort(descending=True)
        kept = law.values.cumsum(-1) - law.values < self._top_p
        values = law.values * kept / (law.values * kept).sum()
        best = slice(0, self._num_children)
        pairs = zip(law.indices[best].tolist(), values[best].tolist(), strict=True)
        return [(token, p) for token, p in pairs if p > 0]

    def _feed(self, tokens: tuple[int, ...]) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self._device)
        if not tokens:
            return ids
        output: torch.Tensor = self._model(
            input_ids=ids, past_key_values=self._cache, use_cache=True
        ).logits
        return output
