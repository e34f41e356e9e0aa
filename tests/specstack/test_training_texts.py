"""Answers as texts: the split, broken lines, missing ids; batches and anchors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specstack.models.heads.vocabulary import DraftVocabulary
from specstack.training.answers import Answer, BadAnswers, to_line
from specstack.training.batches import Draws, collate, epoch_batches
from specstack.training.texts import Text, answer_counts, coverage, is_holdout, read_texts

HELD = [9, 39]
"""Fixed for good: no prompt may change sides between versions."""
ANSWER = Answer(
    line=1, id="1", prompt_sha256="a", messages=(), finish_reason="stop", prompt_tokens=2,
    completion_tokens=3, input_ids=(5, 6), output_ids=(7, 8, 9),
)  # fmt: skip


def answers(num: int) -> list[Answer]:
    return [replace(ANSWER, line=i, prompt_sha256=f"{i:x}") for i in range(num)]


def read(path: Path, lines: list[bytes], **options):
    path.write_bytes(b"".join(lines))
    given = {
        "max_length": 100,
        "holdout_share": 0.0,
        "max_bad_share": 0.0,
        "vocab_size": 10,
        "tokenise": lambda answer: ([1], [2, 3]),
    }
    return read_texts([path], **{**given, **options})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_a_text_is_prompt_and_answer(path: Path) -> None:
    (text,) = read(path, [to_line(ANSWER)]).train
    assert text.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (text.num_prompt, text.num_answer) == (2, 3)


def test_the_split_depends_on_the_prompt_alone(path: Path) -> None:
    lines = [to_line(answer) for answer in answers(400)]
    found = read(path, lines, holdout_share=0.2)
    held = {text.key for text in found.holdout}
    assert 50 < len(held) < 110
    again = read(path, [*lines[200:], *lines[:50]], holdout_share=0.2)
    assert {t.key for t in again.holdout} == {
        t.key for t in (*again.train, *again.holdout) if t.key in held
    }
    assert [is_holdout("a", 0.0), is_holdout("a", 1.0)] == [False, True]
    assert [i for i in range(40) if is_holdout(str(i), 0.1)] == HELD


def test_a_larger_share_keeps_what_was_held_out() -> None:
    small = {i for i in range(500) if is_holdout(str(i), 0.1)}
    large = {i for i in range(500) if is_holdout(str(i), 0.3)}
    assert small < large


def test_broken_lines_are_skipped_with_their_places(path: Path) -> None:
    lines = [to_line(answer) for answer in answers(9)]
    found = read(path, [*lines[:4], b"{}\n", *lines[4:]], max_bad_share=0.1)
    assert len(found.train) == 9
    assert found.notes == (
        f"skipped 1 broken lines: {path}:5: not an answer: KeyError('messages')",
    )


def test_too_many_broken_lines_are_refused(path: Path) -> None:
    with pytest.raises(BadAnswers, match=r"2 of 3 lines are broken, more than answers.max_bad_sha"):
        read(path, [to_line(ANSWER), b"{}\n", b"x\n"], max_bad_share=0.5)


def test_a_line_that_is_being_written_is_no_mistake(path: Path) -> None:
    assert len(read(path, [to_line(ANSWER), to_line(ANSWER)[:40]]).train) == 1


def test_tokens_of_another_model_are_refused(path: Path) -> None:
    with pytest.raises(BadAnswers, match="token 9 is not one of the target's 8"):
        read(path, [to_line(ANSWER)], vocab_size=8)


def test_answers_without_ids_are_tokenised(path: Path) -> None:
    found = read(path, [to_line(replace(ANSWER, output_ids=None))])
    assert found.train[0].tokens.tolist() == [1, 2, 3]
    assert found.notes == ("tokenised 1 answers that came without token ids",)


def test_long_texts_are_cut_and_short_answers_left_out(path: Path) -> None:
    short = replace(ANSWER, output_ids=(7,))
    found = read(path, [to_line(ANSWER), to_line(short)], max_length=4)
    assert [text.tokens.tolist() for text in found.train] == [[5, 6, 7, 8]]
    assert len(found.notes) == 2


def test_nothing_to_train_on_is_refused(path: Path) -> None:
    with pytest.raises(BadAnswers, match="nothing to train on"):
        read(path, [])


def test_only_answer_tokens_are_counted() -> None:
    counts = answer_counts([text(2, 5), text(3, 4)], 8)
    assert counts.tolist() == [0, 0, 1, 2, 1, 0, 0, 0]
    assert coverage(DraftVocabulary.from_counts(counts, 1), counts) == 0.5


def text(num_prompt: int, length: int) -> Text:
    return Text("a", np.arange(length, dtype=np.int32), num_prompt)


DRAWS = Draws("0", 3, block_size=4)


def test_every_text_is_in_an_epoch_and_batches_are_of_similar_length() -> None:
    lengths = [7 * i % 100 + 2 for i in range(70)]
    batches = epoch_batches(lengths, 8, "0")
    assert {len(batch) for batch in batches} == {8}
    assert {i for batch in batches for i in batch} == set(range(70))
    assert len(batches) == 9
    padded = sum(8 * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.15 * sum(lengths[i] for batch in batches for i in batch)
    assert batches == epoch_batches(lengths, 8, "0") != epoch_batches(lengths, 8, "1")


def test_a_batch_larger_than_the_corpus_repeats_texts() -> None:
    assert sorted(epoch_batches([5, 6], 5, "0")[0]) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def test_anchors_are_answer_tokens_with_a_token_after_them() -> None:
    texts = [text(3, 12), text(2, 4)]
    every = collate(texts, [0, 1], replace(DRAWS, per_sequence=None))
    assert every.anchors.tolist() == [list(range(3, 11)), [2, *[-1] * 7]]
    some = collate(texts, [0, 1], DRAWS)
    assert some.anchors.shape == (2, 3)
    assert set(some.anchors[0].tolist()) <= set(range(3, 11))
    assert some.num_real.unique().tolist() == [1]


def test_draws_depend_on_seed_and_text_alone() -> None:
    texts = [text(3, 40), text(2, 30), text(2, 30)]
    together, alone = collate(texts, [0, 1], DRAWS), collate(texts, [1], DRAWS)
    assert torch.equal(together.anchors[1], alone.anchors[0])
    other = collate(texts, [1], replace(DRAWS, seed="1"))
    assert not torch.equal(other.anchors, alone.anchors)
    assert not torch.equal(collate(texts, [2], DRAWS).anchors, alone.anchors)


def test_shares_decide_what_is_drawn() -> None:
    draws = replace(DRAWS, refresh_share=1.0, branch_dropout=0.999, prefix_mix=0.5)
    batch = collate([text(2, 100)] * 20, range(20), draws)
    assert batch.num_real.min() >= 2
    assert batch.num_real.max() == 4
    assert set(batch.lost_branch.tolist()) == {1, 2}
    assert 0.4 < batch.mixed.float().mean() < 0.6
    assert not batch.mixed[:, 0].any()
