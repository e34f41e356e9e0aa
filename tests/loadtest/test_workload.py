"""Workloads: each conversation follows from its place alone, and is what the scenario asks for."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstack_loadtest.lengths import CHARS_PER_TOKEN, cut, draw_length
from specstack_loadtest.scenario import Length, Scenario
from specstack_loadtest.scenario_file import load_scenario, shipped_scenarios
from specstack_loadtest.seeds import Purpose, random_of
from specstack_loadtest.texts import Filler, read_scripts
from specstack_loadtest.workload import Conversation, Workload

NUM = 12
WORDS = ["river", "stone", "maple", "copper", "lantern", "harbour", "violet", "thunder", "pepper"]


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three prompt files: of single prompts, of two turns, and of chats."""
    write(tmp_path / "a.jsonl", *({"prompt": f"a{n}: {' '.join(WORDS)}?"} for n in range(NUM)))
    write(tmp_path / "b.jsonl", *({"turns": [f"b{n}?", f"b{n} again?"]} for n in range(5)))
    chat = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye?")]
    write(tmp_path / "c.jsonl", {"messages": [{"role": r, "content": c} for r, c in chat]})
    return tmp_path


def scenario(folder: Path, *prompts: str, seed: int = 0, **work: Any) -> Scenario:
    data: dict[str, Any] = {
        "version": 1,
        "name": "test",
        "arrivals": {"kind": "closed", "users": [1, 2, 4]},
        "workload": {"prompts": prompts or ("a.jsonl",), "output_tokens": 16, **work},
        "stop": {"seconds": 10.0},
        "seed": seed,
        "folder": str(folder),
    }
    return Scenario.model_validate(data)


def traced(folder: Path, *records: dict[str, Any], **options: Any) -> Workload:
    write(folder / "t.jsonl", *records)
    load = {"kind": "trace", "file": "t.jsonl", **options}
    made = scenario(folder).model_dump() | {"arrivals": load, "folder": str(folder)}
    made["workload"]["output_tokens"] = None
    return Workload(Scenario.model_validate(made))


def texts(one: Conversation) -> list[str]:
    return [turn.messages[-1]["content"] for turn in one.turns]


def text(workload: Workload, phase: int, index: int) -> str:
    return texts(workload.request(phase, index))[0]


# What identity means


@pytest.mark.parametrize("name", shipped_scenarios())
def test_conversations_are_the_same_in_any_order_and_process(name: str) -> None:
    places = [(0, index) for index in range(6)]
    forth, back = Workload(load_scenario(name)), Workload(load_scenario(name))
    expected = [forth.request(*place) for place in places]
    assert [back.request(*place) for place in reversed(places)] == expected[::-1]
    assert [(one.phase, one.index) for one in expected] == places


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_workloads_fit_a_context_of_4096(name: str) -> None:
    scenario = load_scenario(name)
    workload = Workload(scenario)
    for index in range(100):
        turns = workload.request(0, index).turns
        chars = sum(len(message["content"]) for turn in turns for message in turn.messages)
        assert chars / 3 + sum(turn.max_tokens for turn in turns) < 4096 - 200
        assert all(1 <= turn.max_tokens <= 700 for turn in turns)
        assert chars / CHARS_PER_TOKEN <= 1_600


def test_another_seed_asks_otherwise(folder: Path) -> None:
    one, again, other = (Workload(scenario(folder, seed=seed)) for seed in (0, 0, 1))
    asked = [[text(each, 0, index) for index in range(NUM)] for each in (one, again, other)]
    assert asked[0] == asked[1] != asked[2]
    assert sorted(asked[0]) == sorted(asked[2])


def test_sampling_seeds_are_31_bits_and_differ(folder: Path) -> None:
    workload = Workload(scenario(folder, turns=2))
    places = [(phase, index) for phase in range(3) for index in range(40)]
    seeds = [turn.seed for place in places for turn in workload.request(*place).turns]
    assert len(set(seeds)) == 240
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_what_is_drawn_for_one_thing_does_not_move_another(folder: Path) -> None:
    law = {"mean": 16, "cv": 0.5}
    plain = Workload(scenario(folder, output_tokens=law))
    more = Workload(scenario(folder, output_tokens=law, prompt_tokens={"mean": 80, "cv": 0.5},
                             temperature=[{"temperature": 0.0}, {"temperature": 1.0}]))  # fmt: skip
    for index in range(NUM):
        before, after = plain.request(1, index).turns[0], more.request(1, index).turns[0]
        assert before.max_tokens == after.max_tokens
        assert after.messages[-1]["content"].endswith(before.messages[-1]["content"])


def test_purposes_have_streams_of_their_own() -> None:
    drawn = {random_of(0, purpose, 1, 2).random() for purpose in Purpose}
    assert len(drawn) == len(Purpose)


# Prompts


def test_no_prompt_comes_again_before_all_have(folder: Path) -> None:
    workload = Workload(scenario(folder))
    asked = [text(workload, 1, index) for index in range(3 * NUM)]
    for start in range(2 * NUM):
        assert len(set(asked[start : start + NUM])) == NUM


def test_the_same_index_of_another_phase_asks_another_prompt(folder: Path) -> None:
    workload = Workload(scenario(folder))
    for index in range(2 * NUM):
        assert len({text(workload, phase, index) for phase in range(3)}) == 3


def test_files_take_turns(folder: Path) -> None:
    workload = Workload(scenario(folder, "a.jsonl", "b.jsonl"))
    assert "".join(text(workload, 0, index)[0] for index in range(10)) == "ab" * 5
    asked = [text(workload, 0, index) for index in range(2 * NUM)]
    assert Counter(Counter(asked[::2]).values()) == {1: NUM}
    assert Counter(asked[1:11:2]).total() == len(set(asked[1:11:2])) == 5


def test_a_chat_is_sent_whole(folder: Path) -> None:
    (turn,) = Workload(scenario(folder, "c.jsonl")).request(0, 0).turns
    assert [message["role"] for message in turn.messages] == ["system", "user", "assistant", "user"]


# Turns


def test_turns_are_those_of_the_line_then_those_of_others(folder: Path) -> None:
    workload = Workload(scenario(folder, "b.jsonl", turns=4, think_s=1.5))
    for index in range(5):
        conversation = workload.request(0, index)
        first, second, *rest = texts(conversation)
        assert second == first.replace("?", " again?")
        assert len({first, *rest}) == 3
        assert [turn.think_s for turn in conversation.turns] == [0.0, 1.5, 1.5, 1.5]
        assert all(len(turn.messages) == 1 for turn in conversation.turns)


def test_without_more_turns_a_line_gives_its_first(folder: Path) -> None:
    (turn,) = Workload(scenario(folder, "b.jsonl")).request(0, 0).turns
    assert "again" not in turn.messages[0]["content"]


def test_a_single_prompt_is_its_own_next_turn(tmp_path: Path) -> None:
    write(tmp_path / "one.jsonl", {"prompt": "More?"})
    conversation = Workload(scenario(tmp_path, "one.jsonl", turns=3)).request(0, 0)
    assert texts(conversation) == ["More?"] * 3


def test_turns_that_are_no_texts_are_named(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", {"prompt": "fine"}, {"turns": ["fine", ""]})
    with pytest.raises(ValueError, match=r"p\.jsonl:2: expected `turns` that are texts"):
        read_scripts(tmp_path / "p.jsonl")


# Lengths


@pytest.mark.parametrize("cv", [0.3, 1.0])
def test_drawn_lengths_have_their_mean_and_spread(cv: float) -> None:
    random, num = np.random.default_rng(0), 40_000
    drawn = np.array([draw_length(Length(mean=500, cv=cv), random) for _ in range(num)])
    assert drawn.mean() == pytest.approx(500, abs=5 * 500 * cv / math.sqrt(num))
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.05)


def test_answers_have_drawn_lengths_each(folder: Path) -> None:
    workload = Workload(scenario(folder, output_tokens={"mean": 1000, "cv": 0.5}, turns=2))
    places = [(phase, index) for phase in range(3) for index in range(10)]
    drawn = [turn.max_tokens for place in places for turn in workload.request(*place).turns]
    assert len(set(drawn)) > 50


@given(st.floats(1, 1e4), st.floats(0, 5), st.integers(0, 2**32))
def test_lengths_keep_their_bounds(mean: float, cv: float, seed: int) -> None:
    law = Length(mean=mean, cv=cv, min=3, max=900)
    assert 3 <= draw_length(law, np.random.default_rng(seed)) <= 900
    assert draw_length(Length(mean=mean), np.random.default_rng(seed)) == round(mean)


@given(st.text(min_size=1), st.integers(-3, 60))
def test_a_cut_text_is_a_beginning_of_whole_words(text: str, num_chars: int) -> None:
    kept = cut(text, num_chars)
    assert text.startswith(kept)
    assert 1 <= len(kept) <= max(num_chars, 1)
    if kept.split() != text.split() and " " in kept.strip():
        assert kept.split()[:-1] == text.split()[: len(kept.split()) - 1]


def test_words_are_not_cut() -> None:
    assert cut("one two three", 9) == "one two"
    assert cut("incomprehensible", 5) == "incom"
    assert cut("    return x + y", 13) == "    return"


@pytest.mark.parametrize("tokens", [40, 400, 1500])
def test_prompts_are_padded_to_their_length(folder: Path, tokens: int) -> None:
    padded = Workload(scenario(folder, prompt_tokens=tokens))
    plain = Workload(scenario(folder))
    longest_word = 12
    for index in range(NUM):
        asked = text(padded, 0, index)
        assert tokens * CHARS_PER_TOKEN - longest_word <= len(asked) <= tokens * CHARS_PER_TOKEN
        assert asked.endswith("\n\n" + text(plain, 0, index))


def test_padding_is_no_ones_else(folder: Path) -> None:
    workload = Workload(scenario(folder, prompt_tokens=400))
    places = [(phase, index) for phase in range(3) for index in range(40)]
    assert len({text(workload, *place)[:16].split(".")[0] for place in places}) == 120


def test_a_prompt_that_is_too_long_is_left_whole(folder: Path) -> None:
    short, plain = Workload(scenario(folder, prompt_tokens=4)), Workload(scenario(folder))
    assert short.request(0, 0) == plain.request(0, 0)


def test_a_shorter_filler_is_the_beginning_of_a_longer_one() -> None:
    filler = Filler(WORDS)
    long = filler.text("Title.", 900, np.random.default_rng(1))
    assert 890 <= len(long) <= 900
    for num_chars in range(1, 900, 7):
        short = filler.text("Title.", num_chars, np.random.default_rng(1))
        assert long.startswith(short)
    assert filler.text("Title.", 900, np.random.default_rng(2)) != long


# Traces


def test_a_trace_says_how_long_prompts_and_answers_are(folder: Path) -> None:
    rows = [{"timestamp": n, "input_length": 50 * n, "output_length": 10 * n} for n in (8, 2, 4)]
    workload = traced(folder, *rows)
    turns = [workload.request(0, index).turns[0] for index in range(3)]
    assert [turn.max_tokens for turn in turns] == [20, 40, 80]
    for turn, tokens in zip(turns, (100, 200, 400), strict=True):
        length = len(turn.messages[0]["content"])
        assert length == pytest.approx(tokens * CHARS_PER_TOKEN, abs=12)
    halved = traced(folder, *rows, scale_lengths=0.5, scale_outputs=0.1).request(0, 2).turns[0]
    assert halved.max_tokens == 8
    assert len(halved.messages[0]["content"]) == pytest.approx(800, abs=12)
    with pytest.raises(IndexError):
        workload.request(0, 3)


def test_a_prompt_that_is_longer_than_the_trace_says_is_cut(folder: Path) -> None:
    workload = traced(folder, {"timestamp": 0, "input_length": 6, "output_length": 1})
    whole = text(Workload(scenario(folder)), 0, 0)
    asked = text(workload, 0, 0)
    assert whole.startswith(asked)
    assert 24 - 12 <= len(asked) <= 24


def test_prompts_share_what_a_trace_says_they_share(folder: Path) -> None:
    def row(tokens: int, *blocks: int) -> dict[str, Any]:
        return {
            "timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": list(blocks)
        }  # fmt: skip

    workload = traced(folder, row(1536, 0, 1, 2), row(1536, 0, 1, 3), row(1536, 4, 1, 2),
                      row(700, 0, 1), scale_lengths=0.5)  # fmt: skip
    asked = [text(workload, 0, index) for index in range(4)]
    block = 256 * CHARS_PER_TOKEN

    def shared(one: str, other: str) -> int:
        pairs = zip(one, other, strict=False)
        return next(n for n, (a, b) in enumerate(pairs) if a != b)

    assert 2 * block - 30 <= shared(asked[0], asked[1]) <= 2 * block + 30
    assert shared(asked[0], asked[2]) < 10
    assert shared(asked[0], asked[3]) >= 350 * CHARS_PER_TOKEN - 150
    for one, tokens in zip(asked, (768, 768, 768, 350), strict=True):
        assert len(one) == pytest.approx(tokens * CHARS_PER_TOKEN, abs=40)


# Prefixes, temperatures, schemas


def test_shared_prefixes_are_system_prompts_of_few_kinds(folder: Path) -> None:
    shared = {"tokens": 200, "groups": 3}
    workload = Workload(scenario(folder, shared_prefix=shared))
    conversations = [workload.request(0, index) for index in range(60)]
    roles = {tuple(m["role"] for m in c.turns[0].messages) for c in conversations}
    assert roles == {("system", "user")}
    prefixes = Counter(c.turns[0].messages[0]["content"] for c in conversations)
    assert len(prefixes) == 3
    assert min(prefixes.values()) >= 8
    assert all(788 <= len(prefix) <= 800 for prefix in prefixes)


def test_a_shared_prefix_joins_the_system_prompt_of_a_chat(folder: Path) -> None:
    workload = Workload(scenario(folder, "c.jsonl", shared_prefix={"tokens": 50}))
    messages = workload.request(0, 0).turns[0].messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Handbook 0.")
    assert messages[0]["content"].endswith("\n\nBe brief.")


def test_temperatures_come_by_their_shares_and_hold_for_a_conversation(folder: Path) -> None:
    shares = [{"temperature": 0.0, "share": 5.0}, {"temperature": 0.7, "share": 3.0},
              {"temperature": 1.0, "share": 2.0}]  # fmt: skip
    workload = Workload(scenario(folder, temperature=shares, turns=2))
    num = 2_000
    drawn = Counter()
    for index in range(num):
        (temperature,) = {turn.temperature for turn in workload.request(0, index).turns}
        drawn[temperature] += 1
    for temperature, share in ((0.0, 0.5), (0.7, 0.3), (1.0, 0.2)):
        error = math.sqrt(share * (1 - share) / num)
        assert drawn[temperature] / num == pytest.approx(share, abs=5 * error)


def test_a_schema_goes_with_every_request(folder: Path) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    workload = Workload(scenario(folder, structured={"name": "sum", "json_schema": schema}))
    assert workload.request(0, 3).turns[0].response_format == {
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": schema, "strict": True},
    }
    assert Workload(scenario(folder)).request(0, 3).turns[0].response_format is None


def test_exact_output_goes_with_every_request(folder: Path) -> None:
    for exact in (False, True):
        workload = Workload(scenario(folder, exact_output=exact))
        assert workload.request(0, 0).turns[0].exact_output is exact
