"""One evaluation: texts in batches, every configuration over each of them.

Features are computed once per batch, whatever the number of configurations. A drafter that reads
features alone is shared by them; one that keeps tokens, perhaps other requests' too, must not learn
a text from the configuration before, so each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specstack.bind import bind
from specstack.drafters.base import Drafter, DraftRuntime
from specstack.evaluation.configurations import Configuration
from specstack.evaluation.known_texts import MIN_OUTPUT, KnownText
from specstack.evaluation.live import LiveTarget, Sampling
from specstack.evaluation.replay import ReplayTarget
from specstack.evaluation.rounds import Notes, run_batch
from specstack.evaluation.running import KvTable, RunningBatch
from specstack.evaluation.target_model import NOTHING, look_at, num_greedy
from specstack.round import Speculator
from specstack.training.target_model import FrozenTarget
from specstack.types import DraftTree
from specstack.verify.base import VerifyRule


@dataclass(frozen=True)
class Settings:
    """How to go through the texts."""

    batch_size: int
    device: torch.device
    check_greedy: bool = False
    live: Sampling | None = None
    """The target verifies in every round, and answers anew; None: replay."""
    end_tokens: frozenset[int] = frozenset()
    keeps_places: bool = False
    """Note every draft's place in the tree."""


@dataclass
class GreedyCheck:
    """How much of the answers is what the target would say."""

    num_tokens: int = 0
    num_kept: int = 0
    num_texts_cut: int = 0


@dataclass(frozen=True)
class Evaluated:
    """What was found."""

    texts: tuple[KnownText, ...]
    """As they were used: cut, or answered anew; in the order of `Notes`."""
    notes: tuple[Notes, ...]
    """Per configuration."""
    check: GreedyCheck | None


def batches(texts: Sequence[KnownText], size: int) -> Iterator[list[int]]:
    """Indices of texts of similar length, the longest first: memory fails at once or never."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].tokens))
    for start in range(0, len(order), size):
        yield order[start : start + size]


class Evaluator:
    """Drafters and builders of all configurations, and the target if any is needed."""

    def __init__(
        self,
        configurations: Sequence[Configuration],
        texts: Sequence[KnownText],
        target: FrozenTarget | None,
        settings: Settings,
    ) -> None:
        """Bind the parts.

        Raises:
            HeadError: a head does not fit the target.
        """
        self._configurations, self._settings, self._target = configurations, settings, target
        self.texts = list(texts)
        longest = max(len(text.tokens) for text in texts)
        if settings.live is not None:
            longest = max(len(text.prompt) for text in texts) + settings.live.max_new_tokens
        self._table = KvTable(min(settings.batch_size, len(texts)), longest, settings.device)
        self._speculators = self._bound()
        self._notes = [
            Notes(len(texts), keeps_places=settings.keeps_places) for _ in configurations
        ]
        self._check = GreedyCheck() if settings.check_greedy else None

    def run(self, advance: Callable[[int], None]) -> Evaluated:
        """Evaluate; `advance` hears the number of texts that are done."""
        for index in batches(self.texts, self._settings.batch_size):
            if self._settings.live is None:
                self._replay(index)
            else:
                self._live(index)
            advance(len(index))
        return Evaluated(tuple(self.texts), tuple(self._notes), self._check)

    def _bound(self) -> list[Speculator]:
        shared: Drafter | None = None
        found = []
        for configuration in self._configurations:
            parts = bind(configuration.plan)
            drafter = shared or parts.drafter
            assert drafter is not None
            if drafter is not shared and drafter.needs is not None:
                drafter.attach(self._runtime())
            if not drafter.needs_tokens and _is_shareable(self._configurations):
                shared = drafter
            widths = configuration.plan.shapes.verify_widths
            found.append(Speculator(drafter, parts.tree_builder, parts.verify_rule, widths))
        return found

    def _runtime(self) -> DraftRuntime:
        assert self._target is not None
        settings = self._settings
        return DraftRuntime(
            self._target.tables.to(dtype=torch.float32),
            self._table.num_kv_slots,
            len(self._table.slots),
            settings.device,
            torch.float32,
        )

    def _replay(self, index: list[int]) -> None:
        needs = self._speculators[0].needs
        features = None
        if self._target is not None and (needs is not None or self._check is not None):
            texts = [self.texts[i] for i in index]
            features, final = look_at(self._target, texts, needs or NOTHING, self._settings.device)
            if self._check is not None:
                for row, i in enumerate(index):
                    self._cut(i, final[row], self._check)
        kept = [row for row, i in enumerate(index) if len(self.texts[i].output) >= MIN_OUTPUT]
        if not kept:
            return
        texts = [self.texts[index[row]] for row in kept]
        sequences = np.array(index)[kept]
        if needs is None or features is None:
            features = None
        else:
            features = features.index(kept).to(dtype=torch.float32)
        for number in range(len(self._configurations)):
            replay = ReplayTarget(texts, self._table, features, self._settings.device)
            self._run(number, replay, texts, sequences)

    def _cut(self, i: int, final: torch.Tensor, check: GreedyCheck) -> None:
        """Keep what is the target's own greedy answer."""
        assert self._target is not None
        text = self.texts[i]
        num = num_greedy(text, final, self._target.tables.lm_head)
        check.num_tokens += len(text.output)
        check.num_kept += num
        check.num_texts_cut += num < len(text.output)
        self.texts[i] = text.cut(num)

    def _live(self, index: list[int]) -> None:
        settings = self._settings
        assert self._target is not None
        assert settings.live is not None
        texts = [self.texts[i] for i in index]
        for number, speculator in enumerate(self._speculators):
            rule = bind(self._configurations[number].plan).verify_rule
            live = LiveTarget(
                self._target, [text.prompt for text in texts], rule, settings.live,
                settings.end_tokens, self._table, speculator.needs, seeds=index,
            )  # fmt: skip
            self._run(number, live, texts, np.array(index))
            for i, output in zip(index, live.outputs, strict=True):
                self.texts[i] = KnownText(self.texts[i].data_set, self.texts[i].prompt, output)

    def _run(
        self, number: int, batch: RunningBatch, texts: Sequence[KnownText], sequences: np.ndarray
    ) -> None:
        run_batch(
            self._speculators[number],
            self._configurations[number].budget,
            batch,
            [text.prompt for text in texts],
            sequences,
            self._notes[number],
        )


def _is_shareable(configurations: Sequence[Configuration]) -> bool:
    """One drafter serves all: the tree's options reach it as its width."""
    return len({str(c.plan.drafter.options) for c in configurations}) == 1


def decode(
    target: FrozenTarget,
    prompts: Sequence[KnownText],
    rule: VerifyRule,
    sampling: Sampling,
    end_tokens: frozenset[int],
    advance: Callable[[int], None],
) -> list[KnownText]:
    """Let the target answer, without drafts, one prompt after the other."""
    found = []
    device = target.tables.embedding.device
    for number, text in enumerate(prompts):
        live = LiveTarget(
            target, [text.prompt], rule, sampling, end_tokens, KvTable(1, 1, device), None,
            seeds=[number],
        )  # fmt: skip
        with torch.no_grad():
            live.prefill()
            live.drop_finished()
            while live.slots:
                tree = DraftTree.root_only(live.bonus_tokens)
                accepted = rule.accept(tree, live.verify(tree), live.sampling(1), max_depth=0)
                live.commit(tree, accepted)
                live.drop_finished()
        found.append(KnownText(text.data_set, text.prompt, live.outputs[0]))
        advance(1)
    return found
