"""Answers as token ids to train on, split into training and holdout texts.

A prompt's side is decided by its hash alone, so it stays where it is whatever else is in the files
and in whatever order. Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from specstack.models.heads.vocabulary import DraftVocabulary
from specstack.training.answers import START, Answer, BadAnswers, parse_answer

Tokenise = Callable[[Answer], tuple[Sequence[int], Sequence[int]]]
"""From an answer without token ids to those of its prompt and of its answer."""
MIN_ANSWER = 2
"""An anchor and one token after it."""
_NAMED_LINES = 10


@dataclass(frozen=True)
class Text:
    """One prompt with its answer."""

    key: str
    """`prompt_sha256`."""
    tokens: NDArray[np.int32]
    num_prompt: int

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True)
class Texts:
    """What was read."""

    train: tuple[Text, ...]
    holdout: tuple[Text, ...]
    notes: tuple[str, ...]
    """What was left out, and what was tokenised again: one sentence each."""

    def fingerprint(self) -> str:
        """Names the texts and their order."""
        digest = hashlib.sha256()
        for text in (*self.train, *self.holdout):
            digest.update(f"{text.num_prompt},{len(text.tokens)};".encode())
            digest.update(text.tokens.tobytes())
        return digest.hexdigest()[:16]


def is_holdout(key: str, share: float) -> bool:
    """Whether the prompt with this hash is not trained on."""
    value = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    return value < share * 2.0**64


def read_texts(
    files: Sequence[Path],
    *,
    max_length: int,
    holdout_share: float,
    max_bad_share: float,
    vocab_size: int,
    tokenise: Tokenise,
) -> Texts:
    """Read files of answers.

    Raises:
        BadAnswers: more than `max_bad_share` of the lines are broken, a token is not the
            target's, or nothing is left to train on.
    """
    reader = _Reader(max_length, vocab_size, tokenise)
    texts = [text for path in files for text in reader.read(path)]
    total = reader.num_lines
    if len(reader.bad) > max_bad_share * total:
        raise BadAnswers(
            f"{len(reader.bad)} of {total} lines are broken, more than answers.max_bad_share "
            f"{max_bad_share:g}: {_some(reader.bad)}"
        )
    train = tuple(text for text in texts if not is_holdout(text.key, holdout_share))
    holdout = tuple(text for text in texts if is_holdout(text.key, holdout_share))
    if not train:
        raise BadAnswers(f"nothing to train on in {', '.join(map(str, files))} ({total} lines)")
    return Texts(train, holdout, tuple(reader.notes()))


class _Reader:
    def __init__(self, max_length: int, vocab_size: int, tokenise: Tokenise) -> None:
        self.max_length, self.vocab_size, self.tokenise = max_length, vocab_size, tokenise
        self.num_lines = self.num_short = self.num_cut = self.num_tokenised = 0
        self.bad: list[str] = []

    def read(self, path: Path) -> Iterator[Text]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and START.startswith(line[: len(START)]):
                    return  # it is being written
                self.num_lines += 1
                try:
                    text = self.text(parse_answer(line))
                except BadAnswers as error:
                    self.bad.append(f"{path}:{number}: {error}")
                    continue
                if text.num_answer < MIN_ANSWER:
                    self.num_short += 1
                else:
                    yield text

    def text(self, answer: Answer) -> Text:
        prompt, output = answer.input_ids, answer.output_ids
        if prompt is None or output is None:
            prompt, output = map(tuple, self.tokenise(answer))
            self.num_tokenised += 1
        tokens = np.array([*prompt, *output], dtype=np.int64)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            raise BadAnswers(
                f"token {tokens.max()} is not one of the target's {self.vocab_size}: "
                "were these answers made by another model?"
            )
        self.num_cut += len(tokens) > self.max_length
        kept = tokens[: self.max_length].astype(np.int32)
        return Text(answer.prompt_sha256, kept, len(prompt))

    def notes(self) -> Iterator[str]:
        if self.bad:
            yield f"skipped {len(self.bad)} broken lines: {_some(self.bad)}"
        if self.num_short:
            yield f"left out {self.num_short} answers with fewer than {MIN_ANSWER} tokens"
        if self.num_cut:
            yield f"cut {self.num_cut} texts to answers.max_length {self.max_length}"
        if self.num_tokenised:
            yield f"tokenised {self.num_tokenised} answers that came without token ids"


def _some(lines: Sequence[str]) -> str:
    more = len(lines) - _NAMED_LINES
    return "; ".join(lines[:_NAMED_LINES]) + (f"; and {more} more" if more > 0 else "")


def answer_counts(texts: Sequence[Text], vocab_size: int) -> Int[Tensor, " V"]:
    """How often each token stands in an answer."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for text in texts:
        counts += np.bincount(text.tokens[text.num_prompt :], minlength=vocab_size)
    return torch.from_numpy(counts)


def coverage(vocabulary: DraftVocabulary, counts: Int[Tensor, " V"]) -> float:
    """Share of the counted tokens that can be drafted."""
    return float(counts[vocabulary.t2d.cpu()].sum() / counts.sum().clamp(min=1))
