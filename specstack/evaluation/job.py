"""One evaluation: from the options to what the rounds showed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specstack.bind import bind
from specstack.evaluation.bounds import Bounds, sampled_bounds
from specstack.evaluation.configurations import Configuration
from specstack.evaluation.errors import EvaluationError
from specstack.evaluation.evaluate import Evaluated, Evaluator, Settings, decode
from specstack.evaluation.known_texts import KnownText, Named, read_files, require_model
from specstack.evaluation.live import Sampling
from specstack.evaluation.prompts import end_tokens_of, read_prompt_files, sources_of
from specstack.evaluation.report import provenance
from specstack.evaluation.target_model import load_target
from specstack.models.store import sha256_of
from specstack.plan import served_name
from specstack.training.target_model import FrozenTarget

Bar = Callable[[str, int], Callable[[int], None]]
"""From a task and its size to what is called with every step."""


@dataclass(frozen=True)
class Options:
    """The command line; `specstack draft eval --help` describes each."""

    pipeline: Path
    answers: tuple[Path, ...]
    prompts: tuple[Path, ...]
    sources: Path | None
    overrides: tuple[str, ...]
    trees: tuple[str, ...]
    budgets: tuple[int, ...]
    min_survival: float
    load: int
    num: int | None
    holdout_share: float | None
    max_length: int
    batch_size: int
    live: bool
    temperature: float
    top_p: float
    max_tokens: int
    check_greedy: bool | None
    bound: int
    draws: int
    seed: int
    device: str
    dtype: str


@dataclass
class _Texts:
    texts: list[KnownText]
    sha256: dict[str, str]
    law: tuple[float, float]
    """Temperature and top-p of the answers; 0 where they are, or may be, greedy."""
    notes: list[str]

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return self.law[0]


@dataclass(frozen=True)
class Done:
    """What a job found."""

    found: _Texts
    evaluated: Evaluated
    notes: tuple[str, ...]
    began: str
    """ISO 8601."""
    started: float
    """`time.perf_counter`."""


class Job:
    """An evaluation of some configurations, step by step."""

    def __init__(
        self,
        options: Options,
        configurations: Sequence[Configuration],
        *,
        keeps_places: bool = False,
    ) -> None:
        """As `options`, whose trees and budgets the configurations are.

        Raises:
            EvaluationError: they do not fit.
        """
        self.options = options
        self.device = torch.device(_device(options.device))
        self._configurations, self._keeps_places = configurations, keeps_places
        self.plan = configurations[0].plan
        if self.plan.drafter.options.get("drafts") == "drawn" and not options.live:
            raise EvaluationError(
                f"{options.pipeline}: drawn drafts decide what is emitted, so that no answer can be"
                " replayed: give --prompts and --live, or set drafter.drafts to best"
            )
        self._target: FrozenTarget | None = None

    def run(self, bar: Bar) -> Done:
        """Evaluate.

        Raises:
            EvaluationError, BadAnswers, HeadError: something does not fit.
        """
        options, started = self.options, time.perf_counter()
        began = datetime.now(UTC).isoformat(timespec="seconds")
        if self._needs_target:
            self._target = load_target(self.plan, options.dtype, self.device)
        found = self._from_prompts(bar) if options.prompts else self._from_answers()
        evaluator = self._evaluator(found)
        evaluated = evaluator.run(bar("evaluating", len(found.texts)))
        notes = (*found.notes, *self._notes(found, evaluated))
        if all(len(text.output) < 2 for text in evaluated.texts):
            raise EvaluationError(
                "not one answer begins as the target would: they were made by another model, or "
                "sampled (then --no-check-greedy)"
            )
        return Done(found, evaluated, notes, began, started)

    def bounds(self, done: Done, bar: Bar) -> Bounds | None:
        """What no tree can surpass; None at temperature 0, where it is known."""
        options = self.options
        if not done.found.temperature:
            return None
        if not options.bound:
            return Bounds({}, 0)
        assert self._target is not None
        return sampled_bounds(
            self._target, done.evaluated.texts, self._configurations, *done.found.law,
            options.bound, options.seed, bar,
        )  # fmt: skip

    def provenance(self, done: Done, **settings: Any) -> dict[str, Any]:
        """What a reader needs to get the same numbers; `settings` come on top."""
        options = self.options
        return provenance(
            self.plan, began=done.began, seconds=time.perf_counter() - done.started,
            sha256={**done.found.sha256}, seed=options.seed, device=str(self.device),
            dtype=None if self._target is None else self._target.dtype,
            settings={
                "verification": "live" if options.live else "replay",
                "temperature": done.found.temperature,
                "top_p": done.found.law[1],
                "holdout_share": options.holdout_share,
                "batch_size": options.batch_size,
                "max_length": options.max_length,
                **settings,
            },
        )  # fmt: skip

    @property
    def _needs_target(self) -> bool:
        options = self.options
        wanted = options.prompts or options.live or options.check_greedy or options.bound
        return bool(wanted or self.plan.heads)

    def _from_answers(self) -> _Texts:
        options, facts = self.options, self.plan.target.facts
        vocab_size = None if facts is None else facts.vocab_size
        if self._target is not None:
            vocab_size = len(self._target.tables.embedding)
        named = _named(options.sources)
        found = read_files(
            options.answers, num=options.num, max_length=options.max_length,
            vocab_size=vocab_size, data_set=named, holdout_share=options.holdout_share,
        )  # fmt: skip
        law = (options.temperature, options.top_p) if options.live else found.law or (0.0, 1.0)
        if not self._checks_greedy(law[0]):
            require_model(options.answers, served_name(self.plan.target.model))
        return _Texts(list(found.texts), dict(found.sha256), law, list(found.notes))

    def _from_prompts(self, bar: Bar) -> _Texts:
        options, target = self.options, self._target
        assert target is not None
        texts = read_prompt_files(options.prompts, target.model.name_or_path, options.num)
        fitting = [text for text in texts if len(text.prompt) < options.max_length]
        notes = []
        if len(fitting) < len(texts):
            notes.append(
                f"left out {len(texts) - len(fitting)} prompts of --max-length "
                f"{options.max_length} tokens or more"
            )
        if not fitting:
            raise EvaluationError(f"no prompt is shorter than --max-length {options.max_length}")
        if not options.live:
            rule = bind(self.plan).verify_rule
            advance = bar("answering", len(fitting))
            ends = end_tokens_of(target.model)
            fitting = decode(target, fitting, rule, self._sampling, ends, advance)
            short = len(fitting)
            fitting = [text for text in fitting if len(text.output) > 1]
            if len(fitting) < short:
                notes.append(f"left out {short - len(fitting)} answers of a single token")
            if not fitting:
                raise EvaluationError("the target ends every answer with its first token")
        hashes = {str(path): sha256_of(path) for path in options.prompts}
        return _Texts(fitting, hashes, (options.temperature, options.top_p), notes)

    def _evaluator(self, found: _Texts) -> Evaluator:
        options = self.options
        if found.temperature and self.plan.verify.kind == "greedy":
            raise EvaluationError(
                "verify rule greedy takes no sampled answers: --set verify=sample_and_walk"
            )
        settings = Settings(
            batch_size=options.batch_size,
            device=self.device,
            check_greedy=not options.live and self._checks_greedy(found.temperature),
            live=self._sampling if options.live else None,
            end_tokens=end_tokens_of(self._target.model) if self._target else frozenset(),
            keeps_places=self._keeps_places,
        )
        return Evaluator(self._configurations, found.texts, self._target, settings)

    def _checks_greedy(self, temperature: float) -> bool:
        """By default where the target is loaded anyway and the answers may be greedy."""
        options = self.options
        if options.prompts or options.live:
            return False
        if options.check_greedy is None:
            return self._needs_target and not temperature
        return options.check_greedy

    @property
    def _sampling(self) -> Sampling:
        options = self.options
        return Sampling(options.temperature, options.top_p, options.seed, options.max_tokens)

    def _notes(self, found: _Texts, evaluated: Evaluated) -> list[str]:
        check, options = evaluated.check, self.options
        if check is not None:
            share = check.num_kept / max(1, check.num_tokens)
            return [
                f"checked against the target: {check.num_kept} of {check.num_tokens} answer tokens "
                f"({share:.1%}) are its greedy ones and stay; {check.num_texts_cut} answers are "
                "cut at their first other token"
            ]
        if options.prompts or options.live:
            return []
        if found.temperature:
            return [
                f"the answers were sampled at temperature {found.temperature:g}; their replay is "
                "what sample and walk does with that law"
            ]
        return ["the answers were not compared with the target's (--check-greedy does it)"]


def _named(sources: Path | None) -> Named:
    if sources is None:
        return lambda answer: None
    try:
        found = sources_of(sources)
    except ValueError as error:
        raise EvaluationError(f"{sources}: {error}") from None
    return lambda answer: found.get(answer.line)


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise EvaluationError("--device cuda: this machine has no GPU that torch can use")
    return device
