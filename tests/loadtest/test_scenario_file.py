"""Scenario files: what is shipped is sound, and every mistake is named at its place.

The corpus `invalid/` holds one mistake per file, its message in the first line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specstack_dsl import SpecError
from specstack_loadtest.scenario import Closed, Length, Scenario, Share, Trace
from specstack_loadtest.scenario_file import load_scenario, shipped_scenarios
from specstack_loadtest.scenario_rules import RULES

CORPUS = Path(__file__).parent / "invalid"
FILES = sorted(file.name for file in CORPUS.glob("*.yaml"))
SOUND = """version: 1
arrivals: {kind: closed, users: 2}
workload: {prompts: [prompts.jsonl], output_tokens: 16}
stop: {seconds: 10}
"""


def _load(folder: Path, text: str) -> Scenario:
    (folder / "prompts.jsonl").write_text('{"prompt": "Name three rivers."}\n')
    (folder / "mine.yaml").write_text(text)
    return load_scenario(folder / "mine.yaml")


def _error(name_or_path: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_scenario(name_or_path)
    return caught.value


@pytest.mark.parametrize("name", shipped_scenarios())
def test_every_shipped_scenario_is_sound_and_says_what_it_is_for(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.description.endswith(".")


def test_the_shipped_scenarios_are_these() -> None:
    assert set(shipped_scenarios()) == {
        "smoke", "chat-steady", "chat-burst", "code-burst", "shared-prefix", "long-context",
        "structured", "mixed-temperature", "crossover",
    }  # fmt: skip


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    scenario = _load(tmp_path, SOUND)
    assert (scenario.name, scenario.folder) == ("mine", str(tmp_path))
    assert scenario.arrivals == Closed(users=(2,))
    assert scenario.workload.temperature == (Share(temperature=0.0),)
    assert (scenario.seed, scenario.warmup.seconds, scenario.slo.ttft_ms) == (0, None, None)


def test_numbers_stand_for_lists_lengths_and_shares(tmp_path: Path) -> None:
    short = SOUND.replace("output_tokens: 16", "output_tokens: 16, temperature: 0.5")
    long = SOUND.replace("users: 2", "users: [2]").replace(
        "output_tokens: 16", "output_tokens: {mean: 16}, temperature: [{temperature: 0.5}]"
    )
    assert _load(tmp_path, short) == _load(tmp_path, long)
    assert _load(tmp_path, short).workload.output_tokens == Length(mean=16)


def test_a_scenario_that_is_written_out_is_read_the_same(tmp_path: Path) -> None:
    scenario = load_scenario("mixed-temperature")
    written = Scenario.model_validate(scenario.model_dump(exclude_none=True))
    assert written == scenario.model_copy(update={"folder": "."})


def test_files_are_found_from_the_scenarios_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    scenario = load_scenario("code-burst")
    assert isinstance(scenario.arrivals, Trace)
    assert scenario.resolve(scenario.arrivals.file).is_file()
    home = scenario.resolve("~/prompts.jsonl")
    assert home == Path.home() / "prompts.jsonl"


@pytest.mark.parametrize("file", FILES)
def test_a_file_gives_exactly_the_message_in_its_first_line(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CORPUS)
    expected = Path(file).read_text("utf-8").splitlines()[0].removeprefix("# expect: ")
    assert str(_error(file)) == f"{file}:{expected}"


def test_the_corpus_breaks_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CORPUS)
    broken = {problem.rule for file in FILES for problem in _error(file).problems}
    assert broken == {"source", "types", *(rule.__name__ for rule in RULES)}


def test_without_its_mistake_a_file_of_the_corpus_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: what the corpus' files have in common is not what is refused."""
    closed = SOUND.replace("prompts.jsonl", str(CORPUS / "prompts.jsonl"))
    trace = closed.replace("{kind: closed, users: 2}", f"{{kind: trace, file: {CORPUS}/trace.csv}}")
    trace = trace.replace(", output_tokens: 16", "").replace("seconds: 10", "requests: 3")
    for text in (closed, trace):
        monkeypatch.setattr(Path, "read_text", lambda self, encoding, text=text: text)
        assert load_scenario("any.yaml").name == "any"


def test_every_problem_is_reported_in_file_order(tmp_path: Path) -> None:
    text = """version: 1
stop: {seconds: -1}
arrivals: {kind: closed, user: 2}
workload: {prompts: [none.jsonl], turns: 0}
warmup: 3
"""
    with pytest.raises(SpecError) as caught:
        _load(tmp_path, text)
    problems = [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]
    assert problems == [
        "mine.yaml:2:17: stop.seconds: expected above 0, found -1",
        "mine.yaml:3:11: arrivals.users: missing (users at a time; a list is one phase for each)",
        "mine.yaml:3:26: arrivals.user: unknown option of arrivals closed: it has kind, users;"
        " did you mean 'users'?",
        "mine.yaml:4:42: workload.turns: expected at least 1, found 0",
        "mine.yaml:5:9: warmup: expected a mapping, found 3",
    ]


def test_rules_are_all_checked_at_once(tmp_path: Path) -> None:
    text = SOUND.replace("output_tokens: 16", "think_s: 2") + "warmup: {seconds: 20}\n"
    with pytest.raises(SpecError) as caught:
        _load(tmp_path, text)
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["workload.output_tokens", "workload.think_s", "warmup.seconds"]


def test_an_unknown_name_is_told_the_shipped_ones() -> None:
    assert str(_error("smoky")) == (
        "smoky: no shipped scenario: expected one of chat-burst, chat-steady, code-burst,"
        " crossover, long-context, mixed-temperature, shared-prefix, smoke, structured, or a file"
        " of which the name ends in .yaml; did you mean 'smoke'?"
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    assert str(_error(missing)) == f"{missing}: cannot read the file: no such file or directory"
    (tmp_path / "latin.yaml").write_bytes(b"version: 1\ndescription: caf\xe9\n")
    assert "latin.yaml: not UTF-8 text" in str(_error(str(tmp_path / "latin.yaml")))
