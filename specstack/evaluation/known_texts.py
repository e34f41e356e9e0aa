"""Texts whose continuation is known: a prompt and what the target answered, as token ids.

What a target says does not depend on the drafts that it verifies. So its answer, known beforehand,
stands for its forward in every round: greedy answers under the greedy rule, sampled ones under
sample and walk, which samples first and then looks for a draft that carries the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from specstack.evaluation.errors import EvaluationError
from specstack.models.store import sha256_of
from specstack.training.answers import Answer, read_answers
from specstack.training.answers_meta import Settings, read_meta
from specstack.training.texts import is_holdout

MIN_OUTPUT = 2
"""The first token comes with the prompt; one is left to draft."""


@dataclass(frozen=True)
class KnownText:
    """One prompt with its answer."""

    data_set: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of it."""
        return self.prompt + self.output

    def cut(self, num_output: int) -> KnownText:
        """The first tokens of the answer alone."""
        return replace(self, output=self.output[:num_output])


@dataclass(frozen=True)
class AnswerFiles:
    """What was read of some files of answers."""

    texts: tuple[KnownText, ...]
    sha256: Mapping[str, str]
    """Of every file."""
    law: tuple[float, float] | None
    """Temperature and top-p that they were sampled with; None where no file says so."""
    notes: tuple[str, ...]


Named = Callable[[Answer], str | None]
"""The data set of an answer; None: its file's name."""


def read_files(
    files: Sequence[Path],
    *,
    num: int | None,
    max_length: int,
    vocab_size: int | None,
    data_set: Named,
    holdout_share: float | None = None,
) -> AnswerFiles:
    """Read the first `num` answers of each file.

    Args:
        holdout_share: leave out what a training with this share trains on.

    Raises:
        EvaluationError: an answer has no token ids, or those of another model, or none is long
            enough; files were sampled differently.
        BadAnswers: a line is no answer.
    """
    texts: list[KnownText] = []
    num_cut = 0
    for path in files:
        for answer in islice(_held_out(path, holdout_share), num):
            prompt, output = _ids(answer, path)
            _require_known(max((*prompt, *output)), vocab_size, path, answer)
            num_cut += len(prompt) + len(output) > max_length
            text = KnownText(data_set(answer) or path.stem, prompt, output)
            texts.append(text.cut(max(0, max_length - len(prompt))))
    kept = tuple(text for text in texts if len(text.output) >= MIN_OUTPUT)
    if not kept:
        left = "" if holdout_share is None else f" that a holdout of {holdout_share:g} keeps"
        raise EvaluationError(f"no answer of {MIN_OUTPUT} tokens or more{left} in {_names(files)}")
    notes = []
    if len(kept) < len(texts):
        notes.append(
            f"left out {len(texts) - len(kept)} answers with fewer than {MIN_OUTPUT} tokens"
        )
    if num_cut:
        notes.append(f"cut {num_cut} texts to --max-length {max_length}")
    return AnswerFiles(
        kept, {str(path): sha256_of(path) for path in files}, _law(files), tuple(notes)
    )


def require_model(files: Sequence[Path], model: str) -> None:
    """Refuse answers that were made by a model of another name.

    Raises:
        EvaluationError: names both.
    """
    for path, settings in _settings(files):
        if settings.model not in (None, model):
            raise EvaluationError(
                f"{path} was made by {settings.model}, the pipeline's target is {model}: use its "
                "own answers, or --check-greedy, which compares every token with the target's"
            )


def _held_out(path: Path, share: float | None) -> Iterator[Answer]:
    return (a for a in read_answers(path) if share is None or is_holdout(a.prompt_sha256, share))


def _ids(answer: Answer, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if answer.input_ids is None or answer.output_ids is None:
        raise EvaluationError(
            f"{path}: the answer to line {answer.line} has no token ids, which a replay needs: "
            "regenerate with a server that gives them, or use --prompts"
        )
    if not answer.input_ids:
        raise EvaluationError(f"{path}: the answer to line {answer.line} has an empty prompt")
    return answer.input_ids, answer.output_ids


def _require_known(token: int, vocab_size: int | None, path: Path, answer: Answer) -> None:
    if vocab_size is not None and token >= vocab_size:
        raise EvaluationError(
            f"{path}: token {token} of the answer to line {answer.line} is not one of the target's "
            f"{vocab_size}: were these answers made by another model?"
        )


def _settings(files: Sequence[Path]) -> list[tuple[Path, Settings]]:
    found = [(path, read_meta(path)) for path in files]
    return [(path, meta.settings) for path, meta in found if meta is not None]


def _law(files: Sequence[Path]) -> tuple[float, float] | None:
    found = {(settings.temperature, settings.top_p) for _, settings in _settings(files)}
    if len(found) > 1:
        laws = " and ".join(f"temperature {t:g}, top-p {p:g}" for t, p in sorted(found))
        raise EvaluationError(
            f"{_names(files)} were sampled differently ({laws}): evaluate them one by one"
        )
    return found.pop() if found else None


def _names(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files))
