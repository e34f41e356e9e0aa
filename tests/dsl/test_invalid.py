"""The corpus `dsl/invalid/`: one mistake per file, its message in the first line."""

from __future__ import annotations

from pathlib import Path

import pytest

from specstack_dsl import SpecError, load
from specstack_dsl.rules import RULES

CORPUS = Path(__file__).parents[2] / "dsl/invalid"
FILES = sorted(file.name for file in CORPUS.glob("*.yaml"))


@pytest.fixture(autouse=True)
def _inside_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CORPUS)


def _error(file: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(file)
    return caught.value


@pytest.mark.parametrize("file", FILES)
def test_a_file_gives_exactly_the_message_in_its_first_line(file: str) -> None:
    expected = Path(file).read_text("utf-8").splitlines()[0].removeprefix("# expect: ")
    assert str(_error(file)) == f"{file}:{expected}"


@pytest.mark.parametrize("file", FILES)
def test_a_message_says_where_what_and_what_to_do(file: str) -> None:
    (problem,) = _error(file).problems
    assert problem.position.line > 1
    assert problem.position.column >= 1
    assert len(problem.message) >= len("missing kind")


def test_the_corpus_breaks_every_rule() -> None:
    broken = {problem.rule for file in FILES for problem in _error(file).problems}
    assert {rule.name for rule in RULES} <= broken


def test_without_its_mistake_a_file_is_sound(tmp_path: Path) -> None:
    """Control: the rest of the corpus' text is not what is refused."""
    sound = tmp_path / "sound.yaml"
    sound.write_text("version: 1\ntarget: org/model\n")
    load(sound)
